//! The event stream: first the whole snapshot, then deltas.
//!
//! A client slower than the snapshots skips some and then gets a whole one, so no queue grows for it.

use super::{Shown, WhichJob};
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use crate::http::traffic::GaugeGuard;
use crate::state::store::Frame;
use axum::extract::{Query, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};

/// The event for a client that has the snapshot `last`: a delta if it applies to `last`, else the whole snapshot.
fn event(frame: &Frame, last: Option<u64>) -> Event {
    let (name, text) = match &frame.delta {
        Some((base, delta)) if Some(*base) == last => ("delta", delta),
        _ => ("picture", &frame.text),
    };
    Event::default()
        .event(name)
        .id(frame.snapshot.number.to_string())
        .data(&**text)
}

pub(crate) async fn events(
    State(app): State<AppState>,
    Query(which): Query<WhichJob>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let shown = Shown::of(which.job.as_deref(), &app).await?;
    let mut last = None;
    // Counts the stream until it is dropped.
    let counted = GaugeGuard::stream(&app.traffic);
    let changes = WatchStream::new(shown.store().changes()).filter_map(move |frame| {
        // The closure owns `counted` and `shown`, so the job stays watched until the stream is dropped.
        let _ = (&counted, &shown);
        let frame: Arc<Frame> = frame?;
        let event = event(&frame, last);
        last = Some(frame.snapshot.number);
        Some(Ok(event))
    });
    Ok(Sse::new(changes).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}

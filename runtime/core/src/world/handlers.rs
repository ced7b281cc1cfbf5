//! The handlers of a rank's endpoint: functions that a client calls by `POST /handlers/NAME`.

use super::{World, WorldShared};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::publish::{Endpoint, HandlerParameters};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The world's own handler, which changes time-outs.
const TIMEOUTS: &str = "timeouts";

impl<B> World<B> {
    /// Lets this rank's endpoint answer `POST /handlers/NAME?key=value` by a function of the program's own, for example
    /// to change a learning rate or to write a checkpoint. The function gets the pairs of the query, and returns a
    /// text, or why it failed. It runs on a thread of the endpoint, which waits for it at the end of the world: it must
    /// not wait for other ranks, which may be stuck. The clients that may use the endpoint's other routes may call it.
    ///
    /// The name `timeouts` is taken: `POST /handlers/timeouts?ms=30000` sets the time-outs of all groups of this rank.
    /// A world that is [recreated](World::grow) has no handlers of the program's own.
    ///
    /// # Errors
    /// `Unsupported` if this rank has no endpoint; `InvalidArgument` for a name that is taken, or is not 1 to 64
    /// lower-case letters, digits, `-` and `_`, or if there are 64 others.
    pub fn handle(
        &self,
        name: &str,
        handler: impl Fn(&HandlerParameters) -> std::result::Result<String, String>
        + Send
        + Sync
        + 'static,
    ) -> Result<()> {
        let endpoint = self
            .threads
            .as_ref()
            .and_then(|threads| threads.endpoint.as_ref());
        let endpoint = endpoint.ok_or_else(|| {
            let message = "this rank has no endpoint that could answer requests";
            Error::new(ErrorKind::Unsupported, message)
        })?;
        if name == TIMEOUTS {
            let message = format!("the handler {TIMEOUTS:?} is the world's own");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let added = endpoint.handle(name, handler);
        added.map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
    }
}

/// Lets the endpoint change the time-outs of all groups.
pub(super) fn handle_timeouts(endpoint: &Endpoint, shared: &Arc<WorldShared>) {
    let shared = Arc::downgrade(shared);
    let added = endpoint.handle(TIMEOUTS, move |parameters| {
        set_timeouts(&shared, parameters)
    });
    if let Err(error) = added {
        tracing::debug!(%error, "time-outs cannot be changed at the endpoint");
    }
}

/// Answers `POST /handlers/timeouts?ms=N`.
fn set_timeouts(
    shared: &Weak<WorldShared>,
    parameters: &HandlerParameters,
) -> std::result::Result<String, String> {
    let ms = parameters.get("ms").and_then(|ms| ms.parse::<u64>().ok());
    let ms = ms.filter(|&ms| ms > 0);
    let ms = ms.ok_or("ms=N is missing, or is not a number of milliseconds from 1 on\n")?;
    let shared = shared.upgrade().ok_or("the world was shut down\n")?;
    let changed = shared.each(|group| group.set_timeout(Duration::from_millis(ms)));
    Ok(format!(
        "time-out of {changed} of this rank's groups: {ms} ms\n"
    ))
}

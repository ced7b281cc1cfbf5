//! Creates spans of operations as children of the program's own spans.
//!
//! A program that uses `tracing-opentelemetry` adds one more layer. The layer notes on which thread each span was
//! entered and left, and between which record ids. It reads no clock and creates no spans. A separate thread reads
//! the program's ring. It creates a span for each ended operation that was issued inside a span, with the times in
//! the record, as a child of the innermost span that the issuing thread was in. The spans go through the program's
//! own pipeline. Each span links to the trace in which rcomm-web exports the spans of the same operation on all
//! ranks.

use super::operation::{AttributeValue, Operation};
use crate::metrics::new_entries::RecorderCursor;
use opentelemetry::trace::{
    Link, Span as _, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue, Value};
use rcomm_analyzer::MessageNumbers;
use rcomm_recorder::model::Entry;
use rcomm_recorder::publish::Dump;
use rcomm_recorder::record::FlightRecorder;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::dispatcher::{Dispatch, WeakDispatch};
use tracing::span::Id;
use tracing_opentelemetry::get_otel_context;
use tracing_subscriber::layer::{self, Layer};

/// Interval between two reads of the ring.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of visits kept per thread until their operations have ended; the oldest is dropped first.
const MAX_VISITS: usize = 16 * 1024;

/// One visit of a thread to a span: from entering it to leaving it.
struct SpanVisit {
    span: Id,
    /// Number of records that existed when the span was entered.
    after: u64,
    /// Number of records that existed when the span was left; `None` while the thread is in it.
    until: Option<u64>,
    /// The OpenTelemetry context of the span, once it has been queried.
    context: Option<Context>,
}

/// The spans that threads have entered: the layer writes them, the exporting thread reads them.
struct Notes {
    recorder: Arc<FlightRecorder>,
    /// The program's subscriber, once the layer belongs to one.
    dispatch: OnceLock<WeakDispatch>,
    /// By thread number as in the ring, in order of entry.
    threads: Mutex<HashMap<u32, Vec<SpanVisit>>>,
}

impl Notes {
    /// Number of records that exist now.
    fn record_count(&self) -> u64 {
        self.recorder.counters().records
    }

    /// The OpenTelemetry context of a span that has not ended.
    fn context(&self, span: &Id) -> Option<Context> {
        get_otel_context(span, &self.dispatch.get()?.upgrade()?)
    }

    /// Calls `change` with the visits of all threads, under the lock.
    fn with_visits<T>(&self, change: impl FnOnce(&mut HashMap<u32, Vec<SpanVisit>>) -> T) -> T {
        change(&mut self.threads.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn enter(&self, span: &Id) {
        let after = self.record_count();
        self.with_visits(|threads| {
            let visits = threads.entry(calling_thread()).or_default();
            if visits.len() >= MAX_VISITS {
                visits.remove(0);
            }
            visits.push(SpanVisit {
                span: span.clone(),
                after,
                until: None,
                context: None,
            });
        });
    }

    fn exit(&self, span: &Id) {
        let count = self.record_count();
        // The span is alive, so the reading thread finds its context under the lock. Query it outside of the lock:
        // the code that builds a span may hold other locks.
        let thread = calling_thread();
        let open = |visit: &&mut SpanVisit| visit.until.is_none() && visit.span == *span;
        let needed = self.with_visits(|threads| {
            let visits = threads.get_mut(&thread)?;
            let visit = visits.iter_mut().rev().find(open)?;
            Some(visit.after < count && visit.context.is_none())
        });
        let context = needed
            .is_some_and(|needed| needed)
            .then(|| self.context(span));
        self.with_visits(|threads| {
            let Some(visits) = threads.get_mut(&thread) else {
                return;
            };
            if let Some(visit) = visits.iter_mut().rev().find(open) {
                visit.until = Some(count);
                visit.context = visit.context.take().or(context.flatten());
            }
            // Drop visits in which no operation was issued: they are the majority.
            visits.retain(|visit| visit.until.is_none_or(|until| visit.after < until));
        });
    }

    /// The context of the innermost span that `thread` was in when it issued the operation `record_id`. `None` if the
    /// thread was in no span, or the span has no OpenTelemetry context.
    fn parent(&self, thread: u32, record_id: u64) -> Option<Context> {
        self.with_visits(|threads| {
            let visits = threads.get_mut(&thread)?.iter_mut().rev();
            let inside = |visit: &SpanVisit| {
                visit.after < record_id && visit.until.is_none_or(|until| record_id <= until)
            };
            let mut holding = visits.filter(|visit| inside(visit));
            let visit = holding.next()?;
            if visit.context.is_none() && visit.until.is_none() {
                // The span cannot be left, and so cannot end, before this lock is released.
                visit.context = self.context(&visit.span);
            }
            visit.context.clone()
        })
    }

    /// Drops visits that ended before the operation `record_id` was issued.
    fn forget(&self, record_id: u64) {
        self.with_visits(|threads| {
            threads.retain(|_, visits| {
                visits.retain(|visit| visit.until.is_none_or(|until| until >= record_id));
                !visits.is_empty()
            });
        });
    }
}

/// The calling thread's number, as the recorder writes it.
fn calling_thread() -> u32 {
    thread_local! {
        static NUMBER: u32 = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
    }
    NUMBER.with(|number| *number)
}

/// Notes which span each thread is in. Add it after the layer of `tracing-opentelemetry`; spans that a filter hides
/// from either layer get no operations as children.
pub struct ProgramSpansLayer {
    notes: Arc<Notes>,
}

impl<S: tracing::Subscriber> Layer<S> for ProgramSpansLayer {
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        // A layer belongs to one subscriber, so only the first call counts.
        let _ = self.notes.dispatch.set(dispatch.downgrade());
    }

    fn on_enter(&self, id: &Id, _: layer::Context<'_, S>) {
        self.notes.enter(id);
    }

    fn on_exit(&self, id: &Id, _: layer::Context<'_, S>) {
        self.notes.exit(id);
    }
}

/// Creates the spans of a program's operations. When dropped, it reads the ring once more and joins its thread.
pub struct ProgramSpans {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ProgramSpans {
    /// Creates spans of this recorder's operations with this tracer, from now on. Add the returned
    /// layer to the program's subscriber, after that of `tracing-opentelemetry`.
    ///
    /// # Errors
    ///
    /// If the thread `rcomm/program-spans` cannot be started.
    pub fn start<T>(
        recorder: Arc<FlightRecorder>,
        tracer: T,
    ) -> std::io::Result<(Self, ProgramSpansLayer)>
    where
        T: Tracer + Send + 'static,
    {
        let notes = Arc::new(Notes {
            recorder,
            dispatch: OnceLock::new(),
            threads: Mutex::default(),
        });
        let layer = ProgramSpansLayer {
            notes: notes.clone(),
        };
        let (stop, stopped) = channel();
        let mut maker = SpanMaker {
            notes,
            tracer,
            read: RecorderCursor::default(),
            messages: MessageNumbers::default(),
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/program-spans".into())
            .spawn(move || maker.run(&stopped))?;
        let spans = Self {
            stop: Some(stop),
            thread: Some(thread),
        };
        Ok((spans, layer))
    }
}

impl Drop for ProgramSpans {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panicked thread has already reported its panic.
            let _ = thread.join();
        }
    }
}

/// The state of the thread that creates the spans.
struct SpanMaker<T> {
    notes: Arc<Notes>,
    tracer: T,
    read: RecorderCursor,
    messages: MessageNumbers,
}

impl<T: Tracer> SpanMaker<T> {
    fn run(&mut self, stopped: &Receiver<()>) {
        loop {
            let received = stopped.recv_timeout(ROUND_INTERVAL);
            self.round();
            if received != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// Creates the spans of the operations that have ended since the last round.
    fn round(&mut self) {
        if self.read.is_settled_up_to(self.notes.record_count()) {
            return;
        }
        // The notes are at least as new as this snapshot: a thread notes its span before it issues an
        // operation.
        let dump = self.notes.recorder.snapshot();
        let rank = dump.identity.rank.unwrap_or_default();
        self.messages.take(rank, &dump);
        let mut ended = Vec::new();
        self.read.advance(&dump, |entry| ended.push(entry));
        for entry in ended {
            let parent = thread_of(&dump, entry)
                .and_then(|thread| self.notes.parent(thread, entry.record_id));
            if let Some(parent) = parent {
                let message = self.messages.of(entry.record_id);
                self.make(&Operation::new(rank, &dump, entry, message), &parent);
            }
        }
        self.notes.forget(self.read.oldest_wanted());
    }

    fn make(&self, operation: &Operation<'_>, parent: &Context) {
        let time_of = |ns: i64| -> SystemTime {
            UNIX_EPOCH + Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
        };
        let attributes = operation
            .attributes()
            .into_iter()
            .map(|(key, value)| match value {
                AttributeValue::Text(text) => KeyValue::new(key, text),
                AttributeValue::Number(number) => {
                    let number = i64::try_from(number).unwrap_or(i64::MAX);
                    KeyValue::new(key, Value::I64(number))
                }
            });
        let job = &operation.dump.identity.job;
        let link = operation.shared(job).map(|shared| {
            let record_id = operation.entry.record_id;
            Link::with_context(SpanContext::new(
                TraceId::from_bytes(shared.trace_id()),
                SpanId::from_bytes(shared.span_id(operation.rank, record_id)),
                TraceFlags::SAMPLED,
                true,
                TraceState::NONE,
            ))
        });
        let builder = self
            .tracer
            .span_builder(operation.name())
            .with_kind(SpanKind::Internal)
            .with_start_time(time_of(operation.began_ns()))
            .with_attributes(attributes)
            .with_links(link.into_iter().collect());
        let mut span = self.tracer.build_with_context(builder, parent);
        if let Some(error) = operation.error() {
            span.set_status(Status::error(error));
        }
        span.end_with_timestamp(time_of(operation.ended_ns()));
    }
}

/// The number of the thread that issued an operation; `None` if the record lacks it.
fn thread_of(dump: &Dump, entry: &Entry) -> Option<u32> {
    dump.threads.get(entry.thread? as usize)?.id.parse().ok()
}

//! Progress on standard error, for work that takes longer than a second. Only a terminal shows it.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Progress appears after this time: for faster work it would only flicker.
const AFTER: Duration = Duration::from_secs(1);
/// The time between two updates of a [`Wait`]'s line.
const TICK: Duration = Duration::from_millis(200);

/// A target that draws nothing if standard error is not a terminal.
fn target() -> ProgressDrawTarget {
    ProgressDrawTarget::stderr()
}

fn style(template: &str, otherwise: fn() -> ProgressStyle) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| otherwise())
}

/// A bar over work whose number of parts is known. It is removed when this is dropped.
pub(super) struct Meter {
    template: String,
    began: Instant,
    bar: OnceLock<ProgressBar>,
}

impl Meter {
    /// `does` and `parts` are words: `reading` and `files`.
    pub(super) fn new(does: &str, parts: &str) -> Self {
        Self {
            template: format!("{does} {{wide_bar}} {{pos}}/{{len}} {parts}, {{eta}} left"),
            began: Instant::now(),
            bar: OnceLock::new(),
        }
    }

    /// Shows that `done` of `all` parts are done.
    pub(super) fn show(&self, done: usize, all: usize) {
        if self.began.elapsed() < AFTER {
            return;
        }
        let bar = self.bar.get_or_init(|| {
            let bar = ProgressBar::with_draw_target(Some(all as u64), target());
            bar.with_style(style(&self.template, ProgressStyle::default_bar))
        });
        bar.set_position(done as u64);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}

/// A line that shows what the program waits for, and how long it has waited. It is removed when this is dropped.
pub(super) struct Wait {
    /// Dropping it wakes the thread.
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Wait {
    /// `what` completes the sentence "the program is ...": `asking the ranks`.
    pub(super) fn for_what(what: &str) -> Self {
        let (over, ended) = mpsc::channel::<()>();
        let what = what.to_owned();
        let show = move || {
            if ended.recv_timeout(AFTER) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let bar = ProgressBar::with_draw_target(None, target())
                .with_style(style(
                    "{spinner} {msg}, {elapsed}",
                    ProgressStyle::default_spinner,
                ))
                .with_message(what)
                .with_elapsed(AFTER);
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                bar.tick();
            }
            bar.finish_and_clear();
        };
        let thread = thread::Builder::new().name("rcomm-fr/wait".to_owned());
        Self {
            over: Some(over),
            // Without the thread the work goes on, only unseen.
            thread: thread.spawn(show).ok(),
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.over = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

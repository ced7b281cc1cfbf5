//! Shows the progress of work that takes longer than a second, on standard error if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Progress appears after this time: for faster work it would only flicker.
const SHOW_AFTER: Duration = Duration::from_secs(1);
/// The time between two updates of a [`Wait`]'s line.
const TICK: Duration = Duration::from_millis(200);

/// A target that draws nothing if standard error is not a terminal.
fn target() -> ProgressDrawTarget {
    ProgressDrawTarget::stderr()
}

/// The style of a template; `otherwise` if the template cannot be parsed.
fn style(template: &str, otherwise: fn() -> ProgressStyle) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| otherwise())
}

/// A progress bar for work whose number of parts is known. Dropping the meter removes the bar.
pub(super) struct Meter {
    template: String,
    began: Instant,
    bar: OnceLock<ProgressBar>,
}

impl Meter {
    /// `activity` and `parts` are words, such as `reading` and `files`.
    pub(super) fn new(activity: &str, parts: &str) -> Self {
        Self {
            template: format!("{activity} {{wide_bar}} {{pos}}/{{len}} {parts}, {{eta}} left"),
            began: Instant::now(),
            bar: OnceLock::new(),
        }
    }

    /// Shows that `done` of `total` parts are done.
    pub(super) fn show(&self, done: usize, total: usize) {
        if self.began.elapsed() < SHOW_AFTER {
            return;
        }
        let bar = self.bar.get_or_init(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), target());
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

/// A line that shows what the program waits for, and how long it has waited. Dropping the value removes the line.
pub(super) struct Wait {
    /// Dropping the sender ends the thread.
    end: Option<Sender<()>>,
    /// `None` if the thread could not be started.
    thread: Option<JoinHandle<()>>,
}

impl Wait {
    /// Shows the line until the returned value is dropped. `activity` completes the sentence "the program is ...":
    /// `asking the ranks`.
    pub(super) fn during(activity: &str) -> Self {
        let (end, ended) = mpsc::channel::<()>();
        let activity = activity.to_owned();
        let show = move || {
            if ended.recv_timeout(SHOW_AFTER) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let bar = ProgressBar::with_draw_target(None, target())
                .with_style(style(
                    "{spinner} {msg}, {elapsed}",
                    ProgressStyle::default_spinner,
                ))
                .with_message(activity)
                .with_elapsed(SHOW_AFTER);
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                bar.tick();
            }
            bar.finish_and_clear();
        };
        let thread = thread::Builder::new().name("rcomm-fr/wait".to_owned());
        Self {
            end: Some(end),
            // Without the thread only the line is missing.
            thread: thread.spawn(show).ok(),
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! The event loop: each event updates the state, and a changed state is drawn. Other threads send the events through
//! one channel.
//!
//! `rcomm-top/keys` reads the terminal, and `rcomm-top/signals` waits for signals. `rcomm-top/writer` writes files,
//! sends requests to ranks, and reads facts about their processes. Sources and the analysis run on the threads of
//! [`rcomm_analyzer::Watch`]. While the view runs, the main thread does not wait for any of them to finish.

pub mod background;
pub mod terminal;
pub mod writer;

use self::background::LateAnswer;
use self::terminal::{Guard, Mouse, give_back};
use self::writer::RequestTargets;
use crate::state::event::{Command, Event};
use crate::state::{State, update};
use crate::view;
use anyhow::{Context as _, bail};
use ratatui::Frame;
use ratatui::crossterm::clipboard::CopyToClipboard;
use ratatui::crossterm::event as input;
use ratatui::crossterm::event::{KeyEventKind, MouseButton, MouseEventKind};
use ratatui::crossterm::execute;
use rcomm_analyzer::Anchor;
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP};
use signal_hook::iterator::{Handle, Signals};
use std::io::stdout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Shortest time between two frames: at most ten per second.
const FRAME: Duration = Duration::from_millis(100);

/// The channel through which events reach the loop.
pub struct Inbox {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
}

impl Default for Inbox {
    fn default() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }
}

impl Inbox {
    /// Returns a sender of events to this inbox.
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }
}

/// Runs the view until the user quits, or a signal, the end of the terminal or a panic ends it. `targets` are the ranks
/// that can be asked for dumps and call stacks, the reader of facts about processes of this node, and the choice of the
/// job.
///
/// # Errors
///
/// If the terminal cannot be taken over or drawn on, its size is unknown, the signal handlers cannot be installed, the
/// thread that reads keys or waits for signals cannot be started, or any thread panics.
pub fn run(
    state: State,
    inbox: &Inbox,
    anchor: Anchor,
    mouse: Mouse,
    targets: &Arc<RequestTargets>,
) -> anyhow::Result<()> {
    run_drawing(state, inbox, anchor, mouse, targets, view::draw)
}

/// Like [`run`], with a custom drawing function.
///
/// # Errors
///
/// See [`run`].
///
/// # Panics
///
/// If `draw` panics; the terminal is restored before the panic is reported.
pub fn run_drawing(
    mut state: State,
    inbox: &Inbox,
    anchor: Anchor,
    mouse: Mouse,
    targets: &Arc<RequestTargets>,
    mut draw: impl FnMut(&State, &mut Frame<'_>),
) -> anyhow::Result<()> {
    restore_on_panic(inbox.sender());
    let mut guard = Guard::enter(mouse).context("failed to take over the terminal")?;
    let size = guard.terminal().size()?;
    update(&mut state, Event::Resize(size.width, size.height));
    let mut threads = Threads::start(inbox.sender())?;
    let mut drawn: Option<Instant> = None;
    let mut failed = false;
    while !failed {
        let now = Instant::now();
        // The first event after a pause is drawn at once; during a burst of events, at most ten frames a second are
        // drawn.
        let wait = match drawn {
            _ if state.changed => drawn.map_or(Duration::ZERO, |at| FRAME.saturating_sub(now - at)),
            _ => until_next_second(anchor),
        };
        let event = match inbox.receiver.recv_timeout(wait) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        update(&mut state, Event::Tick(anchor.moment()));
        if let Some(command) = event.and_then(|event| update(&mut state, event)) {
            match command {
                Command::Quit => break,
                Command::Fail => failed = true,
                Command::Suspend => {
                    suspend(&mut guard, &threads.suspended)?;
                    update(&mut state, Event::Resumed);
                }
                Command::Redraw => guard.clear()?,
                Command::ShowJob(name) => {
                    let done = show_job(targets, &name);
                    update(&mut state, Event::Done(done));
                }
                Command::Copy(text) => {
                    let done = copy(&text);
                    update(&mut state, Event::Done(done));
                }
                command => match writer::start(&state, command, targets, anchor, inbox.sender()) {
                    Ok(writer) => threads.handles.push(writer),
                    Err(error) => {
                        update(&mut state, Event::Done(Err(error.to_string())));
                    }
                },
            }
        }
        if let Some(command) = state.due_process_facts() {
            // If the thread cannot be started, no facts about processes are shown.
            let reader = writer::start(&state, command, targets, anchor, inbox.sender());
            threads.handles.retain(|handle| !handle.is_finished());
            threads.handles.extend(reader);
        }
        let due = drawn.is_none_or(|at| at.elapsed() >= FRAME);
        if state.changed && due {
            guard.terminal().draw(|frame| draw(&state, frame))?;
            state.changed = false;
            drawn = Some(Instant::now());
        }
    }
    // Restore the terminal before joining the threads.
    drop(guard);
    drop(threads);
    if failed {
        bail!("a thread panicked (see the message above); please report it");
    }
    Ok(())
}

/// The time until the wall clock shows the next second, at least 1 ms.
fn until_next_second(anchor: Anchor) -> Duration {
    let wall = anchor.moment().wall_ns.rem_euclid(1_000_000_000);
    Duration::from_nanos(1_000_000_000 - wall.unsigned_abs()).max(Duration::from_millis(1))
}

fn show_job(targets: &RequestTargets, name: &str) -> Result<String, String> {
    match &targets.job {
        Some(choice) => {
            choice.choose(name);
            Ok(format!("showing job {name}"))
        }
        None => Err("these sources show one job".into()),
    }
}

fn copy(text: &str) -> Result<String, String> {
    execute!(stdout(), CopyToClipboard::to_clipboard_from(text))
        .map(|()| "copied, if the terminal allows it (OSC 52)".to_owned())
        .map_err(|error| format!("failed to copy: {error}"))
}

/// Gives the terminal back and stops this process; once the process is continued, takes the terminal over again.
fn suspend(guard: &mut Guard, suspended: &AtomicBool) -> anyhow::Result<()> {
    suspended.store(true, Ordering::SeqCst);
    guard.lend(|| {
        let this_process = rustix::process::getpid();
        // If the stop is refused, the program continues.
        let _ = rustix::process::kill_process(this_process, rustix::process::Signal::STOP);
    })?;
    suspended.store(false, Ordering::SeqCst);
    Ok(())
}

/// Makes a panic on any thread restore the terminal before it is reported, and end the program.
fn restore_on_panic(sender: Sender<Event>) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        give_back();
        report(info);
        // The loop no longer receives if it is the thread that panicked.
        let _ = sender.send(Event::Panicked);
    }));
}

/// The threads that the event loop has started. When dropped, they are stopped and joined, after pending files are
/// written.
struct Threads {
    /// Set when the thread that reads keys has to end.
    stop: Arc<AtomicBool>,
    /// While set, no keys are read: the terminal belongs to the shell.
    suspended: Arc<AtomicBool>,
    /// Ends the thread that waits for signals.
    signals: Handle,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts the threads that send the key presses and the signals of this process as events.
    fn start(sender: Sender<Event>) -> anyhow::Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGTSTP])
            .context("failed to install the signal handlers")?;
        let mut threads = Self {
            stop: Arc::default(),
            suspended: Arc::default(),
            signals: signals.handle(),
            handles: vec![],
        };
        let (stop, suspended, keys) = (
            threads.stop.clone(),
            threads.suspended.clone(),
            sender.clone(),
        );
        threads.spawn("rcomm-top/keys", move || {
            read_keys(&stop, &suspended, &keys)
        })?;
        threads.spawn("rcomm-top/signals", move || {
            for signal in signals.forever() {
                let event = match signal {
                    SIGTSTP => Event::Suspend,
                    _ => Event::Terminate,
                };
                if sender.send(event).is_err() {
                    return;
                }
            }
        })?;
        Ok(threads)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
        let builder = std::thread::Builder::new().name(name.into());
        let handle = builder.spawn(body);
        self.handles
            .push(handle.context("failed to start a thread")?);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.signals.close();
        for handle in self.handles.drain(..) {
            // A panicked thread has already reported its panic.
            let _ = handle.join();
        }
    }
}

/// Sends key presses, resizes and mouse events to the loop until `stop` is set, or the loop has ended. If the terminal
/// hangs up or cannot be read, sends [`Event::Terminate`] and returns.
fn read_keys(stop: &AtomicBool, suspended: &AtomicBool, sender: &Sender<Event>) {
    /// Longest time until a stop request is noticed.
    const ROUND: Duration = Duration::from_millis(200);
    let mut late = LateAnswer::default();
    while !stop.load(Ordering::SeqCst) {
        if suspended.load(Ordering::SeqCst) {
            std::thread::sleep(ROUND / 4);
            continue;
        }
        match input::poll(ROUND) {
            // A terminal that hung up stays readable and yields no data.
            Ok(false) if !is_hung_up() => continue,
            Ok(true) => {}
            Ok(false) | Err(_) => {
                let _ = sender.send(Event::Terminate);
                return;
            }
        }
        let event = match input::read() {
            Ok(input::Event::Key(key)) if late.includes(&key, Instant::now()) => continue,
            Ok(input::Event::Key(key)) if key.kind != KeyEventKind::Release => Event::Key(key),
            Ok(input::Event::Resize(columns, rows)) => Event::Resize(columns, rows),
            Ok(input::Event::Mouse(mouse)) => match mouse.kind {
                MouseEventKind::ScrollUp => Event::Scroll(-3),
                MouseEventKind::ScrollDown => Event::Scroll(3),
                MouseEventKind::Down(MouseButton::Left) => Event::Click(mouse.column, mouse.row),
                _ => continue,
            },
            Ok(_) => continue,
            Err(_) => {
                let _ = sender.send(Event::Terminate);
                return;
            }
        };
        if sender.send(event).is_err() {
            return;
        }
    }
}

/// Whether the other end of standard input was closed.
fn is_hung_up() -> bool {
    let stdin = rustix::stdio::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok()
        && watched[0].revents().intersects(gone)
}

//! Copies the ranks' output to this process's standard output and standard error, line by line, with the rank in front
//! of each line.

use super::signals::Signals;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::Signal;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum length of a line in bytes; longer lines are split.
const LONGEST_LINE: usize = 64 << 10;
/// Number of pieces of output, each from one read, that a stream's thread may have in its queue. If the queue is full,
/// the ranks' output is not read.
const QUEUE_LENGTH: usize = 64;
/// How long the output may still take after a signal that asks to end a job whose ranks have ended. If the signal came
/// before their end: how long the output may wait without progress.
const LIMIT: Duration = Duration::from_secs(1);
/// Of the time between two looks at the progress, at most this much counts: the launcher itself may have been stopped.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// One of the two output streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

/// Splits a stream of a rank's output into lines, and puts the rank in front of each.
pub(super) struct Lines {
    /// The text in front of each line.
    prefix: String,
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
}

impl Lines {
    pub(super) fn of_rank(rank: u32) -> Self {
        Self {
            prefix: format!("[rank {rank}] "),
            partial: Vec::new(),
        }
    }

    /// Takes output of the rank and returns the lines that it completes, each with the prefix. A line that is too long
    /// is split.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() + self.prefix.len());
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let mut rest = part;
            while self.partial.len() + rest.len() > LONGEST_LINE {
                let (fits, after) = rest.split_at(LONGEST_LINE - self.partial.len());
                self.partial.extend_from_slice(fits);
                self.end_line(&mut out);
                rest = after;
            }
            self.partial.extend_from_slice(rest);
            if self.partial.ends_with(b"\n") {
                self.end_line(&mut out);
            }
        }
        out
    }

    /// Returns the incomplete line as a line, after the rank has closed the stream; empty if there is none.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.partial.is_empty() {
            self.end_line(&mut out);
        }
        out
    }

    /// Moves the incomplete line to `out`, with the prefix and a line end.
    fn end_line(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.prefix.as_bytes());
        out.append(&mut self.partial);
        if !out.ends_with(b"\n") {
            out.push(b'\n');
        }
    }
}

/// One of this process's streams, to which a separate thread writes.
struct Sink {
    /// The thread's queue; `None` once it was closed, or if the thread could not be started.
    pieces: Option<SyncSender<Vec<u8>>>,
    /// Pieces for which the queue had no room.
    waiting: VecDeque<Vec<u8>>,
    /// Number of pieces that came into the queue.
    queued: u64,
    /// Number of pieces that the thread has written, or dropped after an error.
    written: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
    /// The first error of a write, unless the reader has closed the stream; taken once it was reported.
    error: Arc<Mutex<Option<io::Error>>>,
}

impl Sink {
    /// Starts the thread `name`, which writes to `stream`. Without a thread, output is dropped.
    fn start(name: &str, mut stream: impl Write + Send + 'static) -> Self {
        let (pieces, queue) = sync_channel::<Vec<u8>>(QUEUE_LENGTH);
        let error = Arc::<Mutex<Option<io::Error>>>::default();
        let first_error = error.clone();
        let written = Arc::<AtomicU64>::default();
        let count = written.clone();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let (mut is_open, mut has_failed) = (true, false);
                for piece in queue {
                    let result = match is_open {
                        true => stream.write_all(&piece).and_then(|()| stream.flush()),
                        false => Ok(()),
                    };
                    match result {
                        Ok(()) => {}
                        // If the reader has closed the stream (`| head`), the ranks must not stop: their later
                        // output is read and dropped.
                        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => is_open = false,
                        // The next piece is tried: a full disk may have space again.
                        Err(error) if !has_failed => {
                            has_failed = true;
                            let first = first_error.lock();
                            *first.unwrap_or_else(PoisonError::into_inner) = Some(error);
                        }
                        Err(_) => {}
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
            .ok();
        Self {
            // Without the thread, the queue has no reader.
            pieces: thread.is_some().then_some(pieces),
            waiting: VecDeque::new(),
            queued: 0,
            written,
            thread,
            error,
        }
    }

    /// The error of the first write that failed, once, unless the reader had closed the stream.
    fn take_error(&self) -> Option<io::Error> {
        let mut error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        error.take()
    }

    /// Queues a piece, which waits if the queue is full.
    fn push(&mut self, piece: Vec<u8>) {
        if !piece.is_empty() {
            self.waiting.push_back(piece);
            self.forward();
        }
    }

    /// Moves pieces to the queue while it has room.
    fn forward(&mut self) {
        while let (Some(pieces), Some(piece)) = (&self.pieces, self.waiting.pop_front()) {
            match pieces.try_send(piece) {
                Ok(()) => self.queued += 1,
                Err(TrySendError::Full(piece)) => {
                    self.waiting.push_front(piece);
                    return;
                }
                // The thread does not end before the queue.
                Err(TrySendError::Disconnected(_)) => {}
            }
        }
    }

    /// The number of pieces that were written, and whether others wait.
    fn progress(&self) -> (u64, bool) {
        let written = self.written.load(Ordering::Relaxed);
        let others_wait = written != self.queued || !self.waiting.is_empty();
        (written, others_wait)
    }

    /// Closes the queue if no piece waits. Returns whether all pieces are written and the thread has ended.
    fn is_done(&mut self) -> bool {
        self.forward();
        if self.waiting.is_empty() {
            self.pieces = None;
        }
        self.pieces.is_none() && self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// For how long output has waited without progress.
struct Stall {
    /// Number of pieces that were written to both streams, at the last look.
    written: u64,
    /// When it was looked at last.
    looked: Instant,
    /// For how long output has waited while no piece was written.
    time: Duration,
}

/// This process's standard output and standard error.
pub(super) struct Sinks {
    stdout: Sink,
    stderr: Sink,
    /// When to give up what is not written; `None` to wait for the streams' readers as long as they take.
    give_up: Option<Instant>,
    /// If output is given up once it has waited for [`LIMIT`] without progress: for how long it has.
    stall: Option<Stall>,
}

impl Sinks {
    /// Starts the threads that write.
    pub(super) fn start() -> Self {
        Self {
            stdout: Sink::start("rcomm-run/out", io::stdout()),
            stderr: Sink::start("rcomm-run/err", io::stderr()),
            give_up: None,
            stall: None,
        }
    }

    fn sink(&mut self, stream: Stream) -> &mut Sink {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    /// Queues `piece`, to be written in order.
    pub(super) fn push(&mut self, stream: Stream, piece: Vec<u8>) {
        self.sink(stream).push(piece);
    }

    /// Writes a message of the launcher itself to standard error.
    pub(super) fn print_message(&mut self, sentence: &str) {
        self.stderr
            .push(format!("rcomm-run: {sentence}\n").into_bytes());
    }

    /// Whether the stream accepts more output without delay. Also reports, once, that standard output cannot be
    /// written.
    pub(super) fn has_room(&mut self, stream: Stream) -> bool {
        self.report_loss();
        let sink = self.sink(stream);
        sink.forward();
        sink.waiting.is_empty()
    }

    /// Says on standard error, once, that standard output cannot be written.
    fn report_loss(&mut self) {
        if let Some(error) = self.stdout.take_error() {
            self.print_message(&format!(
                "output of the ranks is lost: standard output cannot be written: {error}"
            ));
        }
    }

    /// Soon gives up what is not written, after a signal that asks to end the job: the streams may have no reader.
    pub(super) fn limit_wait(&mut self) {
        self.give_up.get_or_insert_with(|| Instant::now() + LIMIT);
    }

    /// Gives up what is not written once no piece of it was written for [`LIMIT`]: the ranks have ended after a signal
    /// that asks to end the job, and the streams may have no reader. A slow reader gets all that is left.
    pub(super) fn limit_stall(&mut self) {
        self.stall.get_or_insert_with(|| Stall {
            written: 0,
            looked: Instant::now(),
            time: Duration::ZERO,
        });
    }

    /// Whether what is not written is given up.
    pub(super) fn are_given_up(&mut self) -> bool {
        let now = Instant::now();
        let progress = [self.stdout.progress(), self.stderr.progress()];
        let written = progress.iter().map(|&(written, _)| written).sum();
        if let Some(stall) = &mut self.stall {
            let waits = progress.iter().any(|&(_, others_wait)| others_wait);
            let passed = (now - stall.looked).min(LONGEST_PAUSE);
            let time = match waits && written == stall.written {
                true => stall.time + passed,
                false => Duration::ZERO,
            };
            *stall = Stall {
                written,
                looked: now,
                time,
            };
        }
        let is_stalled = self.stall.as_ref().is_some_and(|stall| stall.time >= LIMIT);
        is_stalled || self.give_up.is_some_and(|at| at <= now)
    }

    /// Closes the queues for which no output waits, and reports, once, that standard output cannot be written. Returns
    /// whether all output is written and both threads have ended; the caller polls until then.
    pub(super) fn is_done(&mut self) -> bool {
        // Standard error stays open until it is known whether standard output could be written.
        let is_written = self.stdout.is_done();
        self.report_loss();
        if is_written {
            return self.stderr.is_done();
        }
        self.stderr.forward();
        false
    }

    /// Blocks until the rest of the output is written, for as long as the streams' readers take. After one of `signals`
    /// that asks to end the job, it blocks for at most [`LIMIT`]; after [`limit_stall`](Self::limit_stall), until the
    /// output has made no progress for [`LIMIT`]. Returns that signal if output was given up for it.
    pub(super) fn finish(mut self, signals: Option<&Signals>) -> Option<Signal> {
        let mut stop = None;
        while !self.is_done() {
            if let Some(signal) = signals.and_then(Signals::take_stop) {
                stop.get_or_insert(signal);
                self.limit_wait();
            }
            if self.are_given_up() {
                return stop;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for sink in [&mut self.stdout, &mut self.stderr] {
            if let Some(thread) = sink.thread.take() {
                // The thread ends with the queue and does not panic, so its result is ignored.
                let _ = thread.join();
            }
        }
        None
    }
}

/// Returns a duration as text for messages, such as `5 s` or `1 day 2 h`.
pub(super) fn in_words(duration: Duration) -> String {
    let text = humantime::format_duration(duration).to_string();
    let parts = text.split(' ').map(|part| {
        let unit = part.find(|c: char| !c.is_ascii_digit());
        let (number, unit) = part.split_at(unit.unwrap_or(part.len()));
        let unit = if unit == "m" { "min" } else { unit };
        format!("{number} {unit}")
    });
    parts.collect::<Vec<_>>().join(" ")
}

/// One stream of a rank.
pub(super) struct Output {
    pipe: OwnedFd,
    stream: Stream,
    lines: Lines,
}

impl Output {
    /// Takes the end of a rank's pipe, whose reads return at once from now on.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new(pipe: OwnedFd, stream: Stream, rank: u32) -> io::Result<Self> {
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        let lines = Lines::of_rank(rank);
        Ok(Self {
            pipe,
            stream,
            lines,
        })
    }

    /// Forwards the available output. Returns whether more can follow.
    pub(super) fn forward(&mut self, buffer: &mut [u8], sinks: &mut Sinks) -> bool {
        match rustix::io::read(&self.pipe, &mut *buffer) {
            Ok(count) if count > 0 => {
                sinks.push(self.stream, self.lines.take(&buffer[..count]));
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Ok(_) | Err(_) => {
                self.finish(sinks);
                false
            }
        }
    }

    /// Forwards an incomplete line.
    pub(super) fn finish(&mut self, sinks: &mut Sinks) {
        sinks.push(self.stream, self.lines.finish());
    }

    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_arrive_in_pieces_are_written_whole() {
        let mut lines = Lines::of_rank(3);
        assert_eq!(lines.take(b"one\ntw"), b"[rank 3] one\n");
        assert_eq!(lines.take(b""), b"");
        assert_eq!(lines.take(b"o\n\nthree"), b"[rank 3] two\n[rank 3] \n");
        assert_eq!(lines.finish(), b"[rank 3] three\n");
        assert_eq!(lines.finish(), b"");
    }

    #[test]
    fn a_line_that_is_too_long_is_split_and_nothing_is_lost() {
        let mut lines = Lines::of_rank(0);
        let mut out = Vec::new();
        for _ in 0..7 {
            out.extend(lines.take(&vec![b'x'; 30_000]));
        }
        out.extend(lines.finish());
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.len() <= LONGEST_LINE + 9));
        assert_eq!(text.matches('x').count(), 210_000);
    }

    #[test]
    fn durations_have_their_units_apart() {
        let words = |seconds| in_words(Duration::from_secs(seconds));
        assert_eq!(words(0), "0 s");
        assert_eq!(words(90), "1 min 30 s");
        assert_eq!(words(26 * 3600), "1 day 2 h");
        assert_eq!(in_words(Duration::from_millis(250)), "250 ms");
    }
}

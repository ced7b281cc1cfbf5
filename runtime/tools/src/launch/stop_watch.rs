//! [`StopWatch`]: ends ranks that a signal has stopped and that nothing continues, so that the launcher does not wait
//! for them without a limit.
//!
//! A rank is ended here only if another rank has ended with 0, or if all ranks that are left are stopped: otherwise the
//! ranks that wait for the stopped rank fail at their time-out. A rank that runs is never ended here, however long ago
//! the others have ended: it may be saving a checkpoint. A rank that a debugger has stopped is not ended either: a user
//! looks at it.

use super::output::in_words;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A stopped rank is named on standard error after this time, or after half the limit if that is shorter.
const NAMED_AFTER: Duration = Duration::from_secs(10);
/// The interval at which the ranks' states are read, unless a quarter of the limit is shorter.
const LOOK: Duration = Duration::from_secs(1);
/// The shortest interval at which the ranks' states are read.
const SHORTEST_LOOK: Duration = Duration::from_millis(20);
/// Without a limit, ranks that still run are named on standard error this long after the first rank has ended with 0.
const RUNNING_NAMED_AFTER: Duration = Duration::from_secs(600);

/// The state of a process, according to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The process runs, sleeps or waits, or its state cannot be read.
    Runs,
    /// A signal stopped the process.
    Stopped,
    /// A debugger stopped the process.
    Traced,
}

impl State {
    /// The state of this process.
    pub(super) fn of(pid: u32) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in parentheses may contain anything.
        let state = text
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        match state {
            Some('T') => Self::Stopped,
            Some('t') => Self::Traced,
            _ => Self::Runs,
        }
    }
}

/// A process that has not ended, as a look found it.
pub(super) struct Seen {
    /// The process's index among the launcher's processes.
    pub(super) index: usize,
    /// The process's rank and id, for messages.
    pub(super) name: String,
    pub(super) state: State,
}

/// What the launcher must do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Print this on standard error.
    Print(String),
    /// Ask the process at this index to end, for this reason.
    Terminate(usize, String),
    /// Kill the process at this index.
    Kill(usize),
}

/// What is known of one process.
#[derive(Default)]
struct Stopped {
    /// For how long the process was seen stopped, without a break.
    time: Duration,
    /// Whether the process was named on standard error.
    is_named: bool,
    /// `None` until the process was asked to end, which happens once. Then how much of the grace period is left;
    /// `Some(None)` once it was killed.
    kill: Option<Option<Duration>>,
}

/// Watches the ranks of one attempt.
pub(super) struct StopWatch {
    /// How long a rank may be stopped; `None` without a limit.
    limit: Option<Duration>,
    /// The time between SIGTERM and SIGKILL.
    grace: Duration,
    /// When the states were read last.
    last: Instant,
    /// When the states are to be read next.
    next: Instant,
    /// When the first rank ended with 0.
    first_end: Option<Instant>,
    /// The processes that were looked at, by index; those that run have a time of 0.
    stopped: BTreeMap<usize, Stopped>,
    has_named_running: bool,
}

impl StopWatch {
    /// Makes a watch that begins `now`. With a `limit` of 0, a rank may be stopped without limit.
    pub(super) fn new(limit: Duration, grace: Duration, now: Instant) -> Self {
        Self {
            limit: Some(limit).filter(|limit| !limit.is_zero()),
            grace,
            last: now,
            next: now,
            first_end: None,
            stopped: BTreeMap::new(),
            has_named_running: false,
        }
    }

    /// Notes that a rank has ended with 0.
    pub(super) fn ended_in_order(&mut self, now: Instant) {
        self.first_end.get_or_insert(now);
    }

    /// Whether the process at this index was asked to end.
    pub(super) fn was_asked_to_end(&self, index: usize) -> bool {
        let stopped = self.stopped.get(&index);
        stopped.is_some_and(|stopped| stopped.kill.is_some())
    }

    /// When the next look is due.
    pub(super) fn next_look(&self) -> Instant {
        self.next
    }

    /// The time between two looks.
    fn pause(&self) -> Duration {
        let wanted = self.limit.map_or(LOOK, |limit| limit / 4);
        wanted.clamp(SHORTEST_LOOK, LOOK)
    }

    /// Returns what to do with the processes that have not ended: nothing until the next look is due. `seen` returns
    /// the states of these processes.
    pub(super) fn look(&mut self, seen: impl FnOnce() -> Vec<Seen>, now: Instant) -> Vec<Action> {
        if now < self.next {
            return Vec::new();
        }
        let pause = self.pause();
        // If the launcher itself was stopped in that time, it does not know whether the ranks were stopped throughout.
        let passed = (now - self.last).min(2 * pause);
        (self.last, self.next) = (now, now + pause);
        let seen = seen();
        let is_stuck = !seen.is_empty() && seen.iter().all(|process| process.state != State::Runs);
        let mut actions = self.kill_overdue(&seen, passed);
        if self.first_end.is_none() && !is_stuck {
            // The other ranks report at their time-out that a rank has not joined.
            self.stopped.retain(|_, stopped| stopped.kill.is_some());
            return actions;
        }
        let mut named = Vec::new();
        for process in &seen {
            let known = self.stopped.entry(process.index).or_default();
            if process.state == State::Runs {
                known.time = Duration::ZERO;
                continue;
            }
            known.time += passed;
            let after = self.limit.map_or(NAMED_AFTER, |limit| limit / 2);
            if !known.is_named && known.time >= after.min(NAMED_AFTER) {
                known.is_named = true;
                named.push((process, known.time));
            }
            let limit = self.limit.filter(|_| process.state == State::Stopped);
            if let Some(limit) = limit.filter(|&limit| known.time >= limit)
                && known.kill.is_none()
            {
                known.kill = Some(Some(self.grace));
                let limit = in_words(limit);
                let sentence = format!(
                    "{} was stopped by a signal for {limit}, and is ended",
                    process.name
                );
                actions.push(Action::Terminate(process.index, sentence));
            }
        }
        actions.extend(self.name_stopped(&named));
        actions.extend(self.name_running(&seen, now));
        actions
    }

    /// Returns actions that kill the processes that did not end within the grace period, of which `passed` has passed
    /// since the last look.
    fn kill_overdue(&mut self, seen: &[Seen], passed: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        for process in seen {
            if let Some(known) = self.stopped.get_mut(&process.index)
                && let Some(Some(left)) = &mut known.kill
            {
                *left = left.saturating_sub(passed);
                if left.is_zero() {
                    known.kill = Some(None);
                    actions.push(Action::Kill(process.index));
                }
            }
        }
        actions
    }

    /// Returns the message that names these stopped processes. Each comes with the time for which it has been stopped.
    fn name_stopped(&self, named: &[(&Seen, Duration)]) -> Option<Action> {
        let names_of = |state| {
            let processes = named.iter().map(|(process, _)| process);
            let processes = processes.filter(move |process| process.state == state);
            let names = processes.map(|process| process.name.as_str());
            names.collect::<Vec<_>>()
        };
        let (by_signal, by_debugger) = (names_of(State::Stopped), names_of(State::Traced));
        let mut parts = Vec::new();
        if !by_signal.is_empty() {
            let time = named.iter().map(|&(_, time)| time).max()?;
            let then = match self.limit {
                Some(limit) => format!(
                    "it gets SIGTERM if nothing continues it within {}, and SIGKILL after {} more (--stop-timeout)",
                    in_words(rounded(limit.saturating_sub(time))),
                    in_words(self.grace),
                ),
                None => "rcomm-run waits until something continues it".to_owned(),
            };
            parts.push(format!(
                "{}: stopped by a signal; {then}",
                by_signal.join(", ")
            ));
        }
        if !by_debugger.is_empty() {
            let names = by_debugger.join(", ");
            parts.push(format!(
                "{names}: stopped by a debugger; rcomm-run waits for it"
            ));
        }
        (!parts.is_empty()).then(|| Action::Print(parts.join(". ")))
    }

    /// Returns the message that names the ranks that still run long after the first rank has ended; once only.
    fn name_running(&mut self, seen: &[Seen], now: Instant) -> Option<Action> {
        let after = self.limit.unwrap_or(RUNNING_NAMED_AFTER);
        let is_due = self.first_end.is_some_and(|end| now - end >= after);
        let running = seen.iter().filter(|process| process.state == State::Runs);
        let running: Vec<&str> = running.map(|process| process.name.as_str()).collect();
        if self.has_named_running || !is_due || running.is_empty() {
            return None;
        }
        self.has_named_running = true;
        let they_are = if running.len() == 1 {
            "it is"
        } else {
            "they are"
        };
        Some(Action::Print(format!(
            "{}: not ended {} after the first rank; rcomm-run waits, since {they_are} not stopped",
            running.join(", "),
            in_words(after),
        )))
    }
}

/// Rounds down, for messages: to seconds, or to milliseconds below 5 s.
fn rounded(time: Duration) -> Duration {
    match time.as_secs() {
        0..5 => Duration::from_millis(time.as_millis() as u64),
        seconds => Duration::from_secs(seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);
    const GRACE: Duration = Duration::from_secs(5);

    /// Looks once in each of these seconds; returns the actions, each with the second in which it was due.
    fn watch(
        watch: &mut StopWatch,
        start: Instant,
        seconds: std::ops::Range<u64>,
        states: &[State],
    ) -> Vec<(u64, Action)> {
        let seen = || {
            let rank = |(index, &state): (usize, &State)| Seen {
                index,
                name: format!("rank {index}"),
                state,
            };
            states.iter().enumerate().map(rank).collect()
        };
        let mut actions = Vec::new();
        for second in seconds {
            let due = watch.look(seen, start + Duration::from_secs(second));
            actions.extend(due.into_iter().map(|step| (second, step)));
        }
        actions
    }

    #[test]
    fn only_a_stopped_rank_is_ended_and_others_are_named() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(LIMIT, GRACE, start);
        stop_watch.ended_in_order(start);
        let states = [State::Stopped, State::Runs, State::Traced];
        let actions = watch(&mut stop_watch, start, 0..4000, &states);
        let [
            (10, Action::Print(stopped)),
            (60, Action::Terminate(0, reason)),
            (60, Action::Print(runs)),
            (65, Action::Kill(0)),
        ] = &actions[..]
        else {
            panic!("{actions:?}");
        };
        assert_eq!(
            stopped,
            "rank 0: stopped by a signal; it gets SIGTERM if nothing continues it within 50 s, and SIGKILL after 5 s \
             more (--stop-timeout). rank 2: stopped by a debugger; rcomm-run waits for it"
        );
        assert_eq!(
            reason,
            "rank 0 was stopped by a signal for 1 min, and is ended"
        );
        assert_eq!(
            runs,
            "rank 1: not ended 1 min after the first rank; rcomm-run waits, since it is not stopped"
        );
        assert!(stop_watch.was_asked_to_end(0) && !stop_watch.was_asked_to_end(1));
    }

    #[test]
    fn a_stopped_rank_that_running_ranks_wait_for_is_left_to_their_time_out() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(LIMIT, GRACE, start);
        let some = [State::Stopped, State::Runs];
        assert_eq!(watch(&mut stop_watch, start, 0..1000, &some), []);
        // Once all ranks are stopped, none reaches its time-out.
        let all = [State::Stopped, State::Stopped];
        let actions = watch(&mut stop_watch, start, 1000..1062, &all);
        let ended = actions
            .iter()
            .filter(|(_, action)| matches!(action, Action::Terminate(..)));
        assert_eq!(ended.count(), 2, "{actions:?}");
    }

    #[test]
    fn a_rank_that_is_continued_has_the_whole_time_again() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(LIMIT, GRACE, start);
        stop_watch.ended_in_order(start);
        for minute in 0..10 {
            let begin = minute * 100;
            let end = begin + 50;
            let actions = watch(&mut stop_watch, start, begin..end, &[State::Stopped]);
            assert!(
                !actions
                    .iter()
                    .any(|(_, action)| matches!(action, Action::Terminate(..)))
            );
            watch(&mut stop_watch, start, end..end + 1, &[State::Runs]);
        }
        assert!(!stop_watch.was_asked_to_end(0));
    }

    #[test]
    fn the_time_in_which_the_launcher_was_stopped_does_not_count() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(LIMIT, GRACE, start);
        let all = [State::Stopped];
        assert_eq!(watch(&mut stop_watch, start, 0..3, &all), []);
        assert_eq!(watch(&mut stop_watch, start, 9_000..9_001, &all), []);
    }

    #[test]
    fn a_process_has_its_grace_period_also_if_the_launcher_was_stopped_in_it() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(LIMIT, GRACE, start);
        let all = [State::Stopped];
        let actions = watch(&mut stop_watch, start, 0..61, &all);
        assert!(
            matches!(
                &actions[..],
                [(10, Action::Print(_)), (60, Action::Terminate(0, _))]
            ),
            "{actions:?}"
        );
        // The first look after the stop of the launcher counts as two.
        let actions = watch(&mut stop_watch, start, 9_000..9_010, &all);
        assert_eq!(actions, [(9_003, Action::Kill(0))]);
    }

    #[test]
    fn a_limit_of_0_is_none() {
        let start = Instant::now();
        let mut stop_watch = StopWatch::new(Duration::ZERO, GRACE, start);
        let actions = watch(&mut stop_watch, start, 0..9_000, &[State::Stopped]);
        let [(10, Action::Print(text))] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(
            text,
            "rank 0: stopped by a signal; rcomm-run waits until something continues it"
        );
    }

    #[test]
    fn the_state_of_this_process_is_read() {
        assert_eq!(State::of(std::process::id()), State::Runs);
        assert_eq!(State::of(u32::MAX), State::Runs);
    }
}

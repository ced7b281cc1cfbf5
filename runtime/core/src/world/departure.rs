//! The shutdown of a world: each rank publishes in the store that it leaves, and waits until all ranks
//! have published that.
//!
//! | key, below `rcomm/<attempt>` | holds | writer |
//! |---|---|---|
//! | `gone/<remaining>/<rank>` | an empty value | each rank that leaves |
//! | `gone_count/<remaining>` | how many ranks have left | each rank that leaves |
//! | `all gone/<remaining>` | `1`, once all ranks have left | the last rank that leaves |
//! | `lost/<remaining>` | the first rank that reported a failed shutdown, in four bytes, and its error | a rank that finds another lost, or whose wait has timed out |
//! | `seen/<remaining>` | how many ranks have read how the shutdown ended | every rank that does not serve the store: once it has read that, or as it leaves without reading it |
//!
//! `<remaining>` is the number of ranks that the program has not excluded. A store that does not reply does not
//! make a rank wait longer than absent ranks would.

use super::{WorldShared, session};
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store, StoreQuery, absent_among};
use crate::watch::wait_counters::RuntimeWait;
use rcomm_recorder::model::{Rank, text};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often a waiting rank checks whether processes of other ranks have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How long the check of one rank may take.
const CHECK_TIME: Duration = Duration::from_millis(50);
/// The most ranks that are checked at a time and that an error names.
const MAX_RANKS: usize = 64;
/// The longest time for which the rank that serves the store keeps it for ranks that have left but have not
/// read how the shutdown ended.
const STORE_KEPT: Duration = Duration::from_secs(10);

impl WorldShared {
    /// Publishes that this rank leaves, and waits for the others. `ranks` holds all ranks, this one included.
    ///
    /// # Blocking
    /// Until all ranks have left, for `limit` and a few seconds of last checks at most. The rank that serves
    /// the store then waits up to [`STORE_KEPT`] for the others to read the result.
    ///
    /// # Errors
    /// `PeerLost` names the ranks whose processes have ended, `Timeout` those that have not left. If the
    /// store fails or does not reply, these name rank 0 if it serves the store. Otherwise the store's error.
    pub(super) fn depart(&self, ranks: &[Rank], limit: Duration) -> Result<()> {
        let _waiting = self.watch.waits().begin(RuntimeWait::Shutdown);
        let deadline = Instant::now() + limit;
        match self.count_departure(limit) {
            Some(counted) => counted.map_err(|error| self.store_lost(error))?,
            None => return Err(self.store_silent(limit)),
        }
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            let (key, slice) = (self.all_gone_key(), POLL_INTERVAL.min(time_left));
            let waited = self.ask(time_left.min(POLL_INTERVAL * 2), move |notes| {
                notes.wait(&[&key], slice)
            });
            match waited {
                Some(Ok(())) => {
                    self.keep_store(&[]);
                    return Ok(());
                }
                Some(Err(error)) if error.kind() != ErrorKind::Timeout => {
                    return Err(self.store_lost(error));
                }
                Some(Err(_)) | None => {}
            }
            let is_over = Instant::now() >= deadline;
            if let Some(loss) = self.published_loss() {
                self.keep_store(loss.ranks());
                return Err(loss);
            }
            let Some(missing) = self.missing(ranks) else {
                if is_over {
                    return Err(self.store_silent(limit));
                }
                continue;
            };
            let loss = self.lost_among(&missing).or_else(|| {
                let waited = text::duration(limit);
                let message = format!(
                    "{} did not shut down within {waited}",
                    text::ranks(&missing, MAX_RANKS)
                );
                let late = Error::new(ErrorKind::Timeout, message).with_ranks(&missing);
                (is_over && !missing.is_empty()).then_some(late)
            });
            if let Some(loss) = loss {
                let own_rank = self.place.rank;
                let note = [&own_rank.to_le_bytes()[..], &loss.to_note(own_rank)].concat();
                let key = self.lost_key();
                // If this fails, the others check for the lost rank themselves until their own time-out.
                let _ = self.ask(POLL_INTERVAL, move |notes| {
                    notes.compare_set(&key, b"", &note)
                });
                self.keep_store(loss.ranks());
                return Err(loss);
            }
        }
    }

    /// Publishes that this rank leaves and does not read how the shutdown ends: the rank that serves the store need not
    /// keep the store for this rank. Waits for the store for `limit` and a moment at most; a failure is only logged.
    pub(super) fn leave(&self, limit: Duration) {
        if !matches!(self.count_departure(limit), Some(Ok(()))) {
            tracing::debug!("the store may not have this rank's shutdown notice");
        }
        self.keep_store(&[]);
    }

    /// Runs a request to the store; `None` if it has not replied within `limit`.
    fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        ask: impl FnOnce(&PrefixStore<dyn Store>) -> Result<T> + Send + 'static,
    ) -> Option<Result<T>> {
        let notes = self.notes();
        StoreQuery::ask_within(&self.root, limit, move |_| ask(&notes))
    }

    /// Publishes that this rank leaves, and that all have left if it is the last; `None` if the store does
    /// not reply within `within`.
    fn count_departure(&self, within: Duration) -> Option<Result<()>> {
        let remaining = self.remaining.load(Ordering::Relaxed);
        let own_key = gone_key(remaining, self.place.rank);
        let all_gone = self.all_gone_key();
        let (store, attempt) = (self.store.clone(), self.place.attempt);
        self.ask(within, move |notes| {
            notes.set(&own_key, b"")?;
            // `remaining` does not count excluded ranks.
            let count = notes.add_within(&format!("gone_count/{remaining}"), 1, within)?;
            if count >= i64::from(remaining) {
                session::count_ended_world(&*store, attempt)?;
                notes.set(&all_gone, b"1")?;
            }
            Ok(())
        })
    }

    /// On the rank that serves the store: waits until the others except `lost` have read how the shutdown ended, for at
    /// most [`STORE_KEPT`]. On any other rank: publishes that this rank has read it.
    fn keep_store(&self, lost: &[Rank]) {
        let key = format!("seen/{}", self.remaining.load(Ordering::Relaxed));
        if !self.place.serves_store() {
            if !matches!(
                self.ask(POLL_INTERVAL, move |notes| notes.add(&key, 1)),
                Some(Ok(_))
            ) {
                tracing::debug!("the store may be kept for this rank for longer than needed");
            }
            return;
        }
        let lost = i64::try_from(lost.len()).unwrap_or(i64::MAX);
        let others = i64::from(self.remaining.load(Ordering::Relaxed)) - 1 - lost;
        let until = Instant::now() + STORE_KEPT.min(self.config.timeout);
        while others > 0 && Instant::now() < until {
            let key = key.clone();
            match self.ask(POLL_INTERVAL, move |notes| notes.add(&key, 0)) {
                Some(Ok(seen)) if seen < others => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
    }

    /// The error with which another rank has published that the shutdown failed; `None` if there is none, or
    /// if the store does not reply.
    fn published_loss(&self) -> Option<Error> {
        let key = self.lost_key();
        let look = move |notes: &PrefixStore<dyn Store>| match notes.check(&[&key])? {
            true => notes.get(&key, POLL_INTERVAL).map(Some),
            false => Ok(None),
        };
        let note = self.ask(POLL_INTERVAL, look)?.ok()??;
        let (by, note) = note.split_first_chunk()?;
        Some(Error::from_note(
            note,
            Rank::from_le_bytes(*by),
            self.place.rank,
        ))
    }

    /// The ranks that have not published that they leave; `None` if the store fails or does not reply.
    fn missing(&self, ranks: &[Rank]) -> Option<Vec<Rank>> {
        let remaining = self.remaining.load(Ordering::Relaxed);
        let ranks = ranks.to_vec();
        let found = self.ask(POLL_INTERVAL, move |notes| {
            let keys: Vec<String> = ranks
                .iter()
                .map(|&rank| gone_key(remaining, rank))
                .collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let missing = absent_among(notes, &keys, Instant::now() + POLL_INTERVAL).at_least()?;
            Ok(missing.into_iter().map(|index| ranks[index]).collect())
        });
        found?.ok()
    }

    /// The error that names those of the `missing` ranks whose processes have ended; only the first
    /// [`MAX_RANKS`] are checked. `None` if none has ended, or if the store does not reply.
    fn lost_among(&self, missing: &[Rank]) -> Option<Error> {
        let asked = missing.iter().copied().take(MAX_RANKS);
        let lost = |rank: &Rank| {
            self.factories
                .iter()
                .any(|factory| factory.is_lost(*rank, CHECK_TIME))
        };
        let lost: Vec<Rank> = asked.filter(lost).collect();
        // A process that has ended since the store was read may have published before that it leaves.
        let still_missing = if lost.is_empty() {
            Vec::new()
        } else {
            self.missing(&lost)?
        };
        if still_missing.is_empty() {
            return None;
        }
        let (verb, who) = match still_missing.len() {
            1 => ("is", "its process"),
            _ => ("are", "their processes"),
        };
        let message = format!(
            "{} {verb} gone: {who} ended before the shutdown",
            text::ranks(&still_missing, MAX_RANKS)
        );
        Some(Error::new(ErrorKind::PeerLost, message).with_ranks(&still_missing))
    }

    /// The error of a shutdown in which the store has not replied within `limit`.
    fn store_silent(&self, limit: Duration) -> Error {
        let waited = text::duration(limit);
        if self.store_is_at_rank_0() {
            let message = format!("rank 0, which serves the store, did not answer within {waited}");
            return Error::new(ErrorKind::Timeout, message).with_rank(0);
        }
        let message =
            format!("the store did not answer within {waited}: which ranks shut down is not known");
        Error::new(ErrorKind::Timeout, message)
    }

    /// The error of a shutdown in which the store has failed with `error`.
    fn store_lost(&self, error: Error) -> Error {
        if self.store_is_at_rank_0() {
            let has_ended = self
                .factories
                .iter()
                .any(|factory| factory.is_lost(0, CHECK_TIME));
            let message = match has_ended {
                true => "rank 0 is gone: it served the store, and ended before the shutdown",
                false => {
                    "the connection to the store, which rank 0 serves, was lost before the shutdown"
                }
            };
            return Error::new(ErrorKind::PeerLost, message)
                .with_rank(0)
                .with_source(error);
        }
        error
    }

    /// Whether rank 0 serves the store, and this rank is not rank 0.
    fn store_is_at_rank_0(&self) -> bool {
        self.place.rank != 0 && !self.place.uses_agent_store
    }

    fn lost_key(&self) -> String {
        format!("lost/{}", self.remaining.load(Ordering::Relaxed))
    }

    fn all_gone_key(&self) -> String {
        format!("all gone/{}", self.remaining.load(Ordering::Relaxed))
    }

    fn notes(&self) -> PrefixStore<dyn Store> {
        PrefixStore::new(
            format!("rcomm/{}", self.place.attempt),
            Arc::clone(&self.root),
        )
    }
}

/// The key that a rank sets when it leaves.
fn gone_key(remaining: u32, rank: Rank) -> String {
    format!("gone/{remaining}/{rank}")
}

//! The end of an attempt on all hosts, and the notice that a rank is ended because it was stopped.

use super::{LEAVE_TIME, NOTE_TIME, Nodes, publish_failure, read_failure, stopped_key};
use crate::launch::account::Account;
use crate::launch::output::Sinks;
use crate::launch::pulses::PULSE;
use crate::launch::signals::{Signals, asks_to_stop, name_of, stopped_by};
use crate::launch::{Ended, Failure, LAUNCHER_FAILED, Restart};
use anyhow::Result;
use rcomm::store::{Store, StoreQuery};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Nodes {
    /// Tells the other launchers that a rank of this host is ended because it was stopped. They print it, and end no
    /// rank for it: their ranks may be saving a checkpoint.
    ///
    /// # Blocking
    /// For at most [`NOTE_TIME`].
    pub(in crate::launch) fn publish_stopped(&self, failure: &Failure) -> rcomm::Result<()> {
        if !self.has_others() {
            return Ok(());
        }
        let (key, failure) = (stopped_key(self.attempt()), failure.clone());
        let keys: Arc<dyn Store> = self.keys.clone();
        StoreQuery::within(&keys, NOTE_TIME, move |keys| {
            publish_failure(keys, &key, &failure).map(drop)
        })
    }

    /// Prints, once in an attempt, that a rank of another host was ended because it was stopped, if this is known. To
    /// be called only while no rank of this host was ended for that reason. Does not block.
    pub(in crate::launch) fn tell_stopped_elsewhere(&self, sinks: &mut Sinks) {
        if let Some(failure) = self.remote.stopped()
            && !self.remote.is_stopped_told.swap(true, Ordering::Relaxed)
        {
            sinks.print_message(&failure.on_another_host());
        }
    }

    /// Ends the attempt on this host, and returns the attempt's failure, if any: that a rank was ended because it was
    /// stopped, on this host or on another; otherwise the failure that all launchers know; otherwise the signal to this
    /// launcher that asks to stop, or the failure that another launcher has reported. A failure that this function has
    /// found is printed.
    ///
    /// # Blocking
    /// Without a failure on this host: until the attempt has ended on all hosts, one of them has failed, or a signal
    /// asks to stop.
    pub(in crate::launch) fn end(
        &mut self,
        ended: Ended,
        signals: &Signals,
        account: &mut Account,
        sinks: &mut Sinks,
    ) -> Result<Option<Failure>> {
        if !self.has_others() {
            return Ok(ended.stopped.or(ended.failure));
        }
        let mut outcome = ended.failure;
        if outcome.is_none() {
            let is_stopped = ended.stopped.is_some();
            outcome = match self.wait_for_others(is_stopped, signals, account, sinks) {
                Ok(failure) => failure,
                // The store has failed later: the attempt's failure is still that a rank was ended.
                Err(error) if is_stopped || self.remote.stopped().is_some() => {
                    let sentence = format!("cannot wait for the other hosts: {error}");
                    sinks.print_message(&sentence);
                    Some(Failure {
                        sentence,
                        code: LAUNCHER_FAILED,
                        restart: Restart::Never,
                    })
                }
                Err(error) => return Err(error.into()),
            };
        }
        self.remote.stop.store(true, Ordering::Relaxed);
        if let Some(listener) = self.listener.take() {
            // The thread does not panic, and its failure is read above.
            let _ = listener.join();
        }
        let stopped = ended.stopped.or_else(|| {
            if self.remote.stopped().is_none() {
                self.remote.note_stopped(self.read_stopped()?);
            }
            self.tell_stopped_elsewhere(sinks);
            self.remote.stopped()
        });
        Ok(match (stopped, outcome) {
            (Some(mut stopped), Some(failure)) if failure.restart == Restart::Never => {
                stopped.restart = Restart::Never;
                Some(stopped)
            }
            (stopped, outcome) => stopped.or(outcome),
        })
    }

    /// Notes that the attempt has ended on this host, and waits until it has ended on all hosts. Returns a failure that
    /// ends this wait: one that the launchers know, which is printed, or a signal to this launcher that asks to stop.
    /// With `is_stopped`, a rank of this host was ended because it was stopped; then a message says that this waits.
    fn wait_for_others(
        &self,
        is_stopped: bool,
        signals: &Signals,
        account: &mut Account,
        sinks: &mut Sinks,
    ) -> rcomm::Result<Option<Failure>> {
        let finished = format!("finished/{}", self.attempt());
        let nnodes = i64::from(self.job.nnodes);
        let mut count = self.keys.add(&finished, 1)?;
        if is_stopped && count < nnodes {
            sinks.print_message(
                "the ranks of this host have ended; rcomm-run waits for the other hosts",
            );
        }
        while count < nnodes {
            std::thread::sleep(PULSE / 10);
            if let Some(failure) = self.stopped(signals, account, sinks) {
                return Ok(Some(failure));
            }
            if let Some(failure) = self.remote_failure() {
                sinks.print_message(&failure.on_another_host());
                return Ok(Some(failure));
            }
            if !is_stopped {
                self.tell_stopped_elsewhere(sinks);
            }
            count = self.keys.add(&finished, 0)?;
        }
        Ok(None)
    }

    /// What another launcher has published with [`publish_stopped`](Self::publish_stopped), if the store says it.
    ///
    /// # Blocking
    /// For at most [`LEAVE_TIME`].
    fn read_stopped(&self) -> Option<Failure> {
        let key = stopped_key(self.attempt());
        let keys: Arc<dyn Store> = self.keys.clone();
        let read = StoreQuery::within(&keys, LEAVE_TIME, move |keys| {
            // A key that is there is read without a wait.
            let is_there = keys.check(&[&key])?;
            is_there.then(|| keys.get(&key, LEAVE_TIME)).transpose()
        });
        Some(read_failure(&read.ok()??))
    }

    /// The failure of a signal that asks to stop, if one has come while this launcher waits for the others. They are
    /// notified, and output that no process reads is not waited for.
    pub(super) fn stopped(
        &self,
        signals: &Signals,
        account: &mut Account,
        sinks: &mut Sinks,
    ) -> Option<Failure> {
        let received = signals.take();
        received.iter().for_each(|&signal| account.received(signal));
        account.write(sinks);
        let signal = received.into_iter().find(|&signal| asks_to_stop(signal))?;
        let failure = stopped_by(signal);
        if let Err(error) = self.publish_failure(&failure) {
            sinks.print_message(&format!("failed to notify the other hosts: {error}"));
        }
        let name = name_of(signal);
        sinks.print_message(&format!("{name}: the ranks of this host have ended"));
        sinks.limit_wait();
        Some(failure)
    }
}

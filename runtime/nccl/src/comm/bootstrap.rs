//! How the ranks of a communicator find each other over the store, step by step.
//!
//! First the ranks exchange their descriptions (`peer_info`), then they join. A rank that gives up publishes the
//! reason, and the others stop waiting for the rank.

use super::Comm;
use super::init::{CommInit, InitParams, InitStep, WarmUp};
use super::joined;
use super::members::{BootstrapGroup, Scope};
use super::peer_info::{self, GivenUp, PeerInfo};
use crate::context::Shared;
use crate::cuda::event::Mark;
use crate::library::sys::UniqueId;
use rcomm_core::Deadline;
use rcomm_core::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// What this rank waits for.
enum BootstrapStage {
    /// The ranks exchange their descriptions.
    Gathering,
    /// The library joins the ranks.
    Joining(CommInit),
    /// The communicator exists, and its rings are being connected.
    Connecting(Connecting),
    /// The communicator is ready.
    Joined(Option<Comm>),
}

/// A communicator whose first broadcast, which connects its rings, is on the device.
struct Connecting {
    comm: Option<Comm>,
    end: Mark,
    /// When an error of the communicator was first seen.
    error_since: Option<Instant>,
}

impl Connecting {
    /// Returns whether the broadcast has ended.
    ///
    /// # Errors
    /// Same as [`Comm::is_ready`], once the error is older than [`Comm::GRACE`]; `Backend` if the broadcast failed.
    fn is_done(&mut self, shared: &Shared) -> Result<bool> {
        let _entered = shared.device.enter()?;
        if self.end.is_done()? {
            return Ok(true);
        }
        match self.comm.as_ref().and_then(Comm::async_error) {
            Some(error)
                if self.error_since.get_or_insert_with(Instant::now).elapsed() >= Comm::GRACE =>
            {
                Err(error)
            }
            Some(_) | None => Ok(false),
        }
    }
}

/// One rank's progress toward a communicator.
pub(crate) struct Bootstrap {
    members: BootstrapGroup,
    stage: BootstrapStage,
    next_poll: Instant,
    /// The time from the next poll to the one after it.
    pause: Duration,
    /// The unique ids; none until all ranks have exchanged their descriptions.
    ids: Vec<UniqueId>,
    warm_up: Option<WarmUp>,
}

impl Bootstrap {
    /// The time between the first two polls. Each later pause is twice as long, up to the longest one.
    const FIRST_PAUSE: Duration = Duration::from_micros(200);
    /// The longest time between two polls in a communicator of fewer than 256 ranks.
    const LONGEST_PAUSE: Duration = Duration::from_millis(50);

    /// Publishes this rank's [`PeerInfo`], with a unique id if this rank is to make one.
    ///
    /// # Errors
    /// `Store`; `Backend` if the library cannot make an id.
    pub(crate) fn begin(shared: &Shared, members: BootstrapGroup) -> Result<Self> {
        let own_index = members.own_index;
        let ranks = members.ranks.len() as u32;
        let id = match own_index.is_multiple_of(Self::ranks_per_id(shared, ranks)) {
            true => Some(shared.library.unique_id()?.internal.to_vec()),
            false => None,
        };
        let info = PeerInfo {
            rank: members.ranks[own_index as usize],
            host: shared.host.clone(),
            device: shared.device.ordinal(),
            uuid: shared.device.uuid(),
            version: shared.library.version().0,
            algorithms: shared.options.algorithms.clone(),
            id,
        };
        peer_info::publish_info(&members, &info)?;
        Ok(Self {
            members,
            stage: BootstrapStage::Gathering,
            next_poll: Instant::now(),
            pause: Self::FIRST_PAUSE,
            ids: Vec::new(),
            warm_up: None,
        })
    }

    /// Sets the stream and buffer with which the communicator connects its rings once it exists.
    pub(crate) fn warm_up(&mut self, with: WarmUp) {
        self.warm_up = Some(with);
    }

    /// Returns the number of ranks for which one unique id is made: all ranks, if the library accepts only one id.
    fn ranks_per_id(shared: &Shared, ranks: u32) -> u32 {
        match shared.library.table().comm_init_rank_scalable {
            Some(_) => shared.options.ranks_per_id.max(1),
            None => ranks.max(1),
        }
    }

    /// Returns the longest time between two polls of the store. It grows by `LONGEST_PAUSE` with every 256 ranks, since
    /// one store serves all ranks.
    fn longest_pause(ranks: usize) -> Duration {
        Self::LONGEST_PAUSE * (1 + ranks as u32 / 256)
    }

    /// Returns the pause that follows `pause`.
    fn pause_after(pause: Duration, ranks: usize) -> Duration {
        (pause * 2).min(Self::longest_pause(ranks))
    }

    /// Returns the error for this rank's time-out, which tells what has not ended.
    pub(crate) fn timed_out(&self) -> Error {
        let message = match self.stage {
            BootstrapStage::Connecting(..) => {
                "the broadcast that connects the communicator's rings did not end on the device in time"
            }
            BootstrapStage::Gathering | BootstrapStage::Joining(_) | BootstrapStage::Joined(_) => {
                "the ranks did not all join the communicator in time"
            }
        };
        Error::new(ErrorKind::Timeout, message)
    }

    /// Advances as far as possible without waiting for another rank. Returns `true` once this rank has joined, the
    /// communicator exists, and, if it is a group's and has a warm-up, its rings are connected. Does nothing if the
    /// last step was so recent that the store should not be polled yet.
    ///
    /// # Errors
    /// `Rendezvous` names ranks that do not fit together; those of [`GivenUp::error_elsewhere`]; `Store`; `Backend`
    /// with the library's message.
    pub(crate) fn step(&mut self, shared: &Shared) -> Result<bool> {
        if Instant::now() < self.next_poll {
            return Ok(false);
        }
        let result = self.try_step(shared);
        self.next_poll = Instant::now() + self.pause;
        self.pause = Self::pause_after(self.pause, self.members.ranks.len());
        result
    }

    /// Returns the communicator and the unique ids with which it was joined, once [`step`](Self::step) has
    /// returned `true`; `None` before.
    pub(crate) fn into_comm(self) -> Option<(Comm, Vec<UniqueId>)> {
        match self.stage {
            BootstrapStage::Gathering
            | BootstrapStage::Joining(_)
            | BootstrapStage::Connecting(..) => None,
            BootstrapStage::Joined(comm) => Some((comm?, self.ids)),
        }
    }

    /// Works as [`step`](Self::step), whenever the last step was.
    fn try_step(&mut self, shared: &Shared) -> Result<bool> {
        if let BootstrapStage::Gathering = self.stage {
            let Some(ids) = peer_info::poll(&self.members, shared.options.device_sharing)? else {
                return Ok(false);
            };
            self.ids = ids;
            let size = self.members.ranks.len() as u32;
            let params = InitParams {
                ids: self.ids.clone(),
                rank: self.members.own_index,
                size,
                name: self.members.name.clone(),
            };
            let _entered = shared.device.enter()?;
            let init = CommInit::join(
                &shared.library,
                &shared.device,
                params,
                self.warm_up.clone(),
                &shared.options.comm,
            )?;
            self.stage = BootstrapStage::Joining(init);
        }
        if let BootstrapStage::Joining(init) = &mut self.stage
            && let InitStep::Ready(comm) = init.step()?
        {
            self.stage = self.after_join(shared, comm)?;
            self.pause = Self::FIRST_PAUSE;
        }
        if let BootstrapStage::Connecting(connecting) = &mut self.stage
            && connecting.is_done(shared)?
        {
            self.stage = BootstrapStage::Joined(connecting.comm.take());
        }
        if let BootstrapStage::Joined(_) = self.stage {
            joined::publish(&self.members)?;
            return Ok(true);
        }
        self.check_failure()?;
        Ok(false)
    }

    /// Returns the stage after the join. A group exists once the broadcast that connects its rings has ended on the
    /// device. Until then, the broadcast's kernel holds room on the device, for which operations of other groups may
    /// wait on other ranks. A pair exists at once: its messages come after the broadcast on the same stream.
    fn after_join(&self, shared: &Shared, comm: Option<Comm>) -> Result<BootstrapStage> {
        match &self.warm_up {
            Some(warm_up) if self.members.scope == Scope::Group => {
                let _entered = shared.device.enter()?;
                Ok(BootstrapStage::Connecting(Connecting {
                    comm,
                    end: shared.sync_events.mark(&warm_up.stream)?,
                    error_since: None,
                }))
            }
            _ => Ok(BootstrapStage::Joined(comm)),
        }
    }

    /// Fails if another rank has given up.
    fn check_failure(&self) -> Result<()> {
        let store = &self.members.store;
        if !store.check(&["failed"])? {
            return Ok(());
        }
        let failed = store.get("failed", Duration::from_secs(10))?;
        Err(GivenUp::from_bytes(&failed)?.error_elsewhere())
    }

    /// Publishes that this rank gives up. Returns the error, with the missing ranks as far as they are known.
    ///
    /// # Blocking
    /// For at most `report_time`, until every other rank has reported its outcome.
    pub(crate) fn give_up(&self, error: Error, report_time: Duration) -> Error {
        match self.try_give_up(&error, report_time) {
            Ok(more) => error.with_more(&more),
            Err(_) => error,
        }
    }

    /// Works as [`give_up`](Self::give_up). Returns what is known of the other ranks, as text.
    ///
    /// # Errors
    /// `Store`; `Rendezvous` if an outcome cannot be read or written.
    fn try_give_up(&self, error: &Error, report_time: Duration) -> Result<String> {
        let own_rank = self.members.ranks[self.members.own_index as usize];
        let store = &self.members.store;
        let given_up = GivenUp::new(own_rank, error);
        // The others name the first rank that gives up.
        store.compare_set("failed", b"", &given_up.to_bytes()?)?;
        let has_arrived = peer_info::give_up(&self.members, given_up)?;
        store.set(&format!("left/{}", self.members.own_index), b"")?;
        let deadline = Deadline::In(report_time).started();
        let (mut absent, mut unreported) = self.find_silent_ranks(&has_arrived)?;
        let mut is_latest = true;
        while !deadline.has_passed() {
            if absent.is_empty() && unreported.is_empty() {
                break;
            }
            std::thread::sleep(Self::LONGEST_PAUSE);
            // The rank that serves the store may have given up as well. Then the latest answer is used, though ranks
            // may have reported after it, also that one.
            match self.find_silent_ranks(&has_arrived) {
                Ok(silent) => (absent, unreported) = silent,
                Err(_) => {
                    is_latest = false;
                    break;
                }
            }
        }
        let (no_arrival, no_report) = match is_latest {
            true => ("did not arrive", "arrived and has not reported since"),
            false => (
                "had not arrived when the store last answered",
                "arrived and had not reported when the store last answered",
            ),
        };
        let mut facts = Vec::new();
        if !absent.is_empty() {
            facts.push(format!("{no_arrival}: rank {}", absent.join(", ")));
        }
        if !unreported.is_empty() {
            facts.push(format!("{no_report}: rank {}", unreported.join(", ")));
        }
        Ok(facts.join("; "))
    }
}

impl Bootstrap {
    /// Returns the ranks that have not reported their outcome: those that never arrived, and those that arrived.
    fn find_silent_ranks(
        &self,
        has_arrived: &impl Fn(usize) -> Result<bool>,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let store = &self.members.store;
        let joined = joined::read(&self.members)?;
        let (mut absent, mut unreported) = (Vec::new(), Vec::new());
        for (at, rank) in self.members.ranks.iter().enumerate() {
            if joined[at] || store.check(&[&format!("left/{at}")])? {
                continue;
            }
            if has_arrived(at)? {
                unreported.push(rank.to_string());
            } else {
                absent.push(rank.to_string());
            }
        }
        Ok((absent, unreported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::counting_store::CountingStore;
    use crate::context::options::DeviceSharing;
    use rcomm_core::store::Store;
    use std::sync::Arc;

    /// What one rank does over the store until it has joined, with the pauses of [`Bootstrap::step`]. Returns how often
    /// it has polled in vain.
    fn meet(members: &BootstrapGroup) -> u64 {
        let ranks = members.ranks.len();
        let index = members.own_index;
        let info = PeerInfo {
            rank: index,
            host: "a".to_owned(),
            device: 0,
            uuid: format!("device {index}"),
            version: 23_007,
            algorithms: None,
            id: (index == 0).then(|| vec![7; UniqueId::BYTES]),
        };
        peer_info::publish_info(members, &info).unwrap();
        let (mut polls, mut pause) = (0, Bootstrap::FIRST_PAUSE);
        loop {
            if let Some(ids) = peer_info::poll(members, DeviceSharing::Refused).unwrap() {
                assert_eq!(ids.len(), 1);
                break;
            }
            polls += 1;
            std::thread::sleep(pause);
            pause = Bootstrap::pause_after(pause, ranks);
        }
        joined::publish(members).unwrap();
        polls
    }

    #[test]
    fn a_rank_whose_store_has_ended_does_not_say_that_others_still_have_not_reported() {
        let members = |store| BootstrapGroup {
            scope: Scope::Group,
            store,
            ranks: vec![4, 5, 6],
            own_index: 1,
            name: "all".to_owned(),
        };
        let given_up = |store: Arc<dyn Store>, report_time| {
            let members = members(store);
            for arrived in [0, 1] {
                let key = format!("peer_info/{arrived}");
                members.store.set(&key, b"").unwrap();
            }
            let bootstrap = Bootstrap {
                members,
                stage: BootstrapStage::Gathering,
                next_poll: Instant::now(),
                pause: Bootstrap::FIRST_PAUSE,
                ids: Vec::new(),
                warm_up: None,
            };
            let error = bootstrap.give_up(bootstrap.timed_out(), report_time);
            error.to_string()
        };
        let store = Arc::new(CountingStore::default());
        let text = given_up(store.clone(), Duration::ZERO);
        let sentence = "did not arrive: rank 6; arrived and has not reported since: rank 4";
        assert!(text.ends_with(sentence), "{text}");
        // This store answers as many questions, and none of a second round.
        let store = Arc::new(CountingStore::ending_after(store.keys()));
        let text = given_up(store, Duration::from_secs(600));
        let sentence = "had not arrived when the store last answered: rank 6; arrived and had not reported when \
                        the store last answered: rank 4";
        assert!(text.ends_with(sentence), "{text}");
    }

    #[test]
    fn ranks_1024_meet_and_read_a_few_keys_each() {
        const RANKS: u32 = 1024;
        const STACK: usize = 256 << 10;
        let store = Arc::new(CountingStore::default());
        let start = Instant::now();
        let polls: Vec<u64> = std::thread::scope(|scope| {
            let rank = |own_index| {
                let members = BootstrapGroup {
                    scope: Scope::Group,
                    store: store.clone(),
                    ranks: (0..RANKS).collect(),
                    own_index,
                    name: "all".to_owned(),
                };
                let thread = std::thread::Builder::new().stack_size(STACK);
                thread.spawn_scoped(scope, move || meet(&members)).unwrap()
            };
            let threads: Vec<_> = (0..RANKS).map(rank).collect();
            let polls = threads.into_iter().map(|thread| thread.join().unwrap());
            polls.collect()
        });
        let time = start.elapsed();
        // The time is not asserted, since it depends on the machine's load. It was 0.3 s. The longest pause of this
        // many ranks is 0.25 s.
        println!("{RANKS} ranks met within {time:?}");
        // Each rank counts itself, checks for the outcome, reads it, and notes that it has joined. The first rank also
        // reads the counter and each value once, and writes the outcome. One counter of joined ranks serves 48
        // ranks, and the last of them counts the counter as complete.
        let needed = u64::from(5 * RANKS + 2 + RANKS.div_ceil(48));
        // A poll in vain reads one key; on the first rank, it reads two.
        let in_vain = polls.iter().sum::<u64>() + polls[0];
        assert_eq!(store.keys(), needed + in_vain);
        println!("{in_vain} keys were read in vain");
        assert_eq!(store.num_keys().unwrap(), 0);
    }
}

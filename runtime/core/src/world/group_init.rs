//! The making of a group: its members, its name, and its backends.

use crate::backend::wrapper::Wrapper;
use crate::backend::{Agreement, Backend, BackendFactory, GroupContext};
use crate::config::NanCheck;
use crate::group::maker::{GroupMaker, GroupOptions, Origin};
use crate::group::process_group::{Group, GroupParts, Lane, ProcessGroup};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::hints::Hints;
use crate::store::{BatchReply, BatchRequest, PrefixStore, Store, StoreQuery};
use crate::watch::watched::WatchedGroup;
use crate::world::WorldShared;
use rcomm_recorder::model::{ProcessGroupInfo, Rank};
use sha2::{Digest, Sha256};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

impl GroupMaker for WorldShared {
    fn new_group(
        self: Arc<Self>,
        ranks: &[Rank],
        options: &GroupOptions,
        origin: Origin<'_>,
    ) -> Result<ProcessGroup> {
        let (rank, size) = (self.place.rank, self.place.world_size);
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, message);
            let desc = options.desc.as_str();
            Err(error.in_group(if desc.is_empty() { "(new)" } else { desc }))
        };
        if ranks.is_empty() {
            return refuse("a group needs at least one rank".to_owned());
        }
        for (index, &member) in ranks.iter().enumerate() {
            if member >= size {
                return refuse(format!("rank {member} is not in a world of {size} ranks"));
            }
            if ranks[..index].contains(&member) {
                return refuse(format!("rank {member} is listed twice"));
            }
        }
        if !ranks.contains(&rank) {
            return refuse(format!(
                "the list omits rank {rank}, which makes the group: only members may make it"
            ));
        }
        let base = if options.desc.is_empty() {
            "group"
        } else {
            &options.desc
        };
        let nth = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let count = made.entry((base.to_owned(), ranks.to_vec())).or_default();
            *count += 1;
            *count
        };
        let name = match nth {
            1 => base.to_owned(),
            nth => format!("{base}.{nth}"),
        };
        let made = self.make_group(name, ranks.to_vec(), options, origin);
        made.inspect_err(|error| self.record_unmade(error))
    }

    fn decline_split(&self, parent: &Group, options: &GroupOptions) -> Result<()> {
        let spec = options.backend.as_ref().unwrap_or(&self.config.backend);
        let deadline = Deadline::In(self.config.init_timeout).started();
        let mut factories = self.factories_of(spec)?.into_iter();
        factories.try_for_each(|factory| match parent.backend(factory.name()) {
            Some(backend) => backend.decline_split(deadline),
            None => Ok(()),
        })
    }

    fn group_store(&self, wire_id: u64) -> Arc<dyn Store> {
        let prefix = format!("rcomm/{}/group/{wire_id:016x}", self.place.attempt);
        Arc::new(PrefixStore::new(prefix, self.root.clone()))
    }
}

impl WorldShared {
    /// Makes a group of `ranks`, of which this rank is one. All members pass the same `name`.
    pub(crate) fn make_group(
        self: &Arc<Self>,
        name: String,
        ranks: Vec<Rank>,
        options: &GroupOptions,
        origin: Origin<'_>,
    ) -> Result<ProcessGroup> {
        let place = &self.place;
        self.check_going_on(&name)?;
        let wire_id = wire_id(&name, &ranks, place.attempt);
        let info = ProcessGroupInfo {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            desc: match options.desc.as_str() {
                "" => "undefined".to_owned(),
                desc => desc.to_owned(),
            },
            name,
            ranks: ranks.into(),
        };
        let named = |error: Error| error.in_group(info.name.clone());
        let group_rank = info.group_rank_of(place.rank).ok_or_else(|| {
            named(Error::new(
                ErrorKind::InvalidArgument,
                "this rank is not a member",
            ))
        })?;
        let spec = options.backend.as_ref().unwrap_or(&self.config.backend);
        let store = self.group_store(wire_id);
        let deadline = Deadline::In(self.config.init_timeout).started();
        let checks = self.checks.load(Ordering::Relaxed);
        // A rank that compares would wait for ranks that do not.
        let wanted = match checks {
            true => format!("{spec} with checks"),
            false => spec.clone(),
        };
        if info.ranks.len() > 1 {
            let value = wanted.as_bytes();
            let factory = self.factories.first();
            let agreed = factory.map_or(Ok(None), |factory| {
                factory.agree(wire_id, value, &info.ranks, group_rank, deadline)
            });
            let other = match agreed.map_err(named)? {
                Some(Agreement::Same) => None,
                Some(Agreement::Other(other)) => Some(other),
                None => {
                    let held = agree_in(&store, value, info.ranks.len(), deadline);
                    Some(held.map_err(named)?).filter(|held| held != value)
                }
            };
            if let Some(other) = other {
                return Err(named(Error::new(
                    ErrorKind::Rendezvous,
                    format!(
                        "this rank wants the backends {wanted:?}, another member {:?}",
                        String::from_utf8_lossy(&other)
                    ),
                )));
            }
        }
        let mut lanes: Vec<Lane> = Vec::new();
        for factory in self.factories_of(spec).map_err(named)? {
            let context = GroupContext {
                info: info.clone(),
                group_rank,
                wire_id,
                store: Arc::new(PrefixStore::new(factory.name(), store.clone())),
                hints: options.hints.clone(),
            };
            let derived = origin.derive(factory.name(), &context, deadline);
            let backend = match derived.map_err(named)? {
                Some(backend) => backend,
                None => factory.connect(context, deadline).map_err(named)?,
            };
            let params = BackendParams {
                name: factory.name(),
                group_rank,
                store: &store,
                deadline,
            };
            let backend = self.wrap(backend, &info, checks, params).map_err(named)?;
            lanes.push(Lane {
                device: factory.device(),
                backend,
            });
        }
        let timeout = options.timeout.unwrap_or(self.config.timeout);
        let parts = GroupParts {
            info,
            group_rank,
            wire_id,
            lanes,
            timeout,
            recorder: self.recorder.clone(),
            watch: self.watch.clone(),
            config: self.config.clone(),
            maker: Arc::<Self>::downgrade(self) as Weak<dyn GroupMaker>,
            hints: options.hints.clone(),
        };
        let group = Group::new(parts);
        // The world closes the groups that it knows once it has begun to end: this one may have come after that, and no
        // watchdog would end its operations.
        if let Err(error) = self.check_going_on(&group.info().name) {
            if let Err(not_closed) = group.shut_down(deadline) {
                group.close(None, not_closed);
            }
            return Err(error);
        }
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.retain(|group| group.strong_count() > 0);
        registry.push(Arc::downgrade(&group));
        drop(registry);
        Ok(ProcessGroup::over(group))
    }

    /// Refuses a group once the world has begun to end.
    fn check_going_on(&self, name: &str) -> Result<()> {
        if !self.is_ending.load(Ordering::SeqCst) {
            return Ok(());
        }
        let message = "the world ends, or is being recreated: no group can be made in it";
        Err(Error::new(ErrorKind::Closed, message).in_group(name))
    }

    /// Records that a group could not be made, which leaves no operation in the record. Without this note, the record
    /// of a rank that ends because it lost another one would look like that of a rank that ended first.
    fn record_unmade(&self, error: &Error) {
        let is_no_failure = matches!(
            error.kind(),
            ErrorKind::Closed | ErrorKind::InvalidArgument | ErrorKind::Unsupported
        );
        if is_no_failure {
            return;
        }
        let mut failure = error.failure(self.place.rank);
        if let Some(group) = error.group() {
            failure.text = format!("group {group}: {}", failure.text);
            failure.limit();
        }
        self.recorder.note_failure(&failure);
    }

    /// Wraps this backend if the ranks must compare what they issue (`checks`), or if the configuration asks for a
    /// check for NaN. The ranks then compare what they issue to the backend, and check for NaN where configured.
    /// Otherwise returns the backend as it is.
    fn wrap(
        &self,
        backend: Arc<dyn Backend>,
        info: &ProcessGroupInfo,
        checks: bool,
        params: BackendParams<'_>,
    ) -> Result<Arc<dyn Backend>> {
        let config = &self.config;
        if !checks && config.nan_check == NanCheck::Off {
            return Ok(backend);
        }
        let name = format!("{}/{}/checks", info.name, params.name);
        let side = GroupContext {
            group_rank: params.group_rank,
            wire_id: wire_id(&name, &info.ranks, self.place.attempt),
            hints: Hints::NONE,
            store: Arc::new(PrefixStore::new(
                format!("{}/checks", params.name),
                params.store.clone(),
            )),
            info: ProcessGroupInfo {
                name,
                ..info.clone()
            },
        };
        let factory = self.factories.first().ok_or_else(|| {
            let message = "the ranks have no backend over which to compare what they issue";
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let side = factory.connect(side, params.deadline)?;
        let nan_check = config.nan_check;
        let wrapper = Wrapper::new(backend, side, &info.ranks, nan_check);
        Ok(Arc::new(wrapper))
    }

    /// The factories that a list such as `NAME` or `DEVICE:NAME,DEVICE:NAME` names.
    ///
    /// # Errors
    /// `InvalidArgument` if a backend is not known, is for another kind of memory than the list says, or is
    /// the second one for a kind of memory.
    fn factories_of(&self, spec: &str) -> Result<Vec<&Arc<dyn BackendFactory>>> {
        let mut chosen: Vec<&Arc<dyn BackendFactory>> = Vec::new();
        for part in spec.split(',') {
            let (device, name) = match part.trim().split_once(':') {
                Some((device, name)) => (Some(device.trim()), name.trim()),
                None => (None, part.trim()),
            };
            let known = |factory: &&Arc<dyn BackendFactory>| factory.name() == name;
            let factory = self.factories.iter().find(known).ok_or_else(|| {
                let names: Vec<_> = self
                    .factories
                    .iter()
                    .map(|factory| factory.name())
                    .collect();
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!(
                        "no backend is called {name:?}: the backends are {}",
                        names.join(", ")
                    ),
                )
            })?;
            let kind = factory.device();
            if device.is_some_and(|device| device != kind.name()) {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("backend {name} takes {kind} memory, but {part:?} names another"),
                ));
            }
            if chosen.iter().any(|other| other.device() == kind) {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("{spec:?} names two backends for {kind} memory"),
                ));
            }
            chosen.push(factory);
        }
        Ok(chosen)
    }
}

/// Returns the value of the first of this many members of a group that calls this with the group's store. The last one
/// removes the keys: a job that makes and destroys groups for days would otherwise fill the store with them.
fn agree_in(
    store: &Arc<dyn Store>,
    value: &[u8],
    members: usize,
    deadline: Deadline,
) -> Result<Vec<u8>> {
    let value = value.to_vec();
    StoreQuery::within(store, deadline.remaining(), move |store| {
        agree_at(store, &value, members)
    })
}

/// Makes the requests of [`agree_in`].
fn agree_at(store: &dyn Store, value: &[u8], members: usize) -> Result<Vec<u8>> {
    const VALUE: &str = "backend";
    const READ: &str = "backend/read";
    let replies = store.batch(&[
        BatchRequest::CompareSet {
            key: VALUE,
            expected: b"",
            desired: value,
        },
        BatchRequest::Add {
            key: READ,
            delta: 1,
        },
    ])?;
    let [BatchReply::Value(held), BatchReply::Count(read)] = &replies[..] else {
        let message = "the store's answers are not those to the requests";
        return Err(Error::new(ErrorKind::Store, message));
    };
    if usize::try_from(*read).is_ok_and(|read| read >= members) {
        for key in [VALUE, READ] {
            // The group is made in any case: at worst the store keeps a key.
            if let Err(error) = store.delete(key) {
                tracing::debug!(%error, "cannot remove a key of a group that is made");
            }
        }
    }
    Ok(held.clone())
}

/// The parameters of the backend that `wrap` wraps, besides its members.
struct BackendParams<'a> {
    name: &'static str,
    group_rank: u32,
    store: &'a Arc<dyn Store>,
    deadline: Deadline,
}

/// The number that distinguishes the traffic of groups on shared connections: the beginning of a hash of the
/// attempt, the name and the members, so that all members compute the same number.
fn wire_id(name: &str, ranks: &[Rank], attempt: u32) -> u64 {
    let mut hash = Sha256::new();
    hash.update(attempt.to_le_bytes());
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    for rank in ranks {
        hash.update(rank.to_le_bytes());
    }
    let digest: [u8; 32] = hash.finalize().into();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(first)
}

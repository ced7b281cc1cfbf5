//! How a world makes a group: its members, its name, and the backends that carry it.

use crate::backend::wrapper::Wrapper;
use crate::backend::{Agreement, Backend, BackendFactory, GroupContext};
use crate::config::{DebugLevel, NanCheck};
use crate::group::process_group::{Group, GroupParts, Lane, ProcessGroup};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store};
use crate::world::WorldShared;
use rcomm_recorder::model::{ProcessGroupInfo, Rank};
use sha2::{Digest, Sha256};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Options of a new group.
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// What it is for (`dp`, `tp`, `pp`); what records and errors call it.
    pub desc: String,
    /// How long its operations may take; `None` = as the world's.
    pub timeout: Option<Duration>,
    /// Its backends, as [`Config::backend`](crate::Config::backend) has them; `None` = as the world's.
    pub backend: Option<String>,
}

impl GroupOptions {
    /// A group for this purpose, otherwise like the world.
    pub fn named(desc: impl Into<String>) -> Self {
        Self {
            desc: desc.into(),
            ..Self::default()
        }
    }
}

/// What a group is made from: a backend may have a cheaper way than connecting anew.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// Nothing.
    New,
    /// Some members of this group, which stays open.
    Split(&'a Group),
    /// The members that are left of this group, which was aborted.
    Shrink(&'a Group),
}

impl Origin<'_> {
    /// The new group's backend, as the old one's makes it; `None` if it must be connected.
    fn derive(
        self,
        name: &str,
        context: &GroupContext,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn Backend>>> {
        let made = match self {
            Self::New => return Ok(None),
            Self::Split(parent) => match parent.backend(name) {
                Some(backend) => backend.split(context, deadline),
                None => return Ok(None),
            },
            Self::Shrink(parent) => match parent.backend(name) {
                Some(backend) => backend.shrink(context, deadline),
                None => return Ok(None),
            },
        };
        match made {
            Ok(backend) => Ok(Some(backend)),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl WorldShared {
    pub(crate) fn new_group(
        self: &Arc<Self>,
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
        for (at, &member) in ranks.iter().enumerate() {
            if member >= size {
                return refuse(format!("rank {member} is not in a world of {size} ranks"));
            }
            if ranks[..at].contains(&member) {
                return refuse(format!("rank {member} is listed twice"));
            }
        }
        if !ranks.contains(&rank) {
            return refuse(format!(
                "the list omits rank {rank}, which makes the group: only members do"
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
        self.make_group(name, ranks.to_vec(), options, origin)
    }

    /// Takes part in a split of this group as a member of no part of it.
    fn decline_split(&self, parent: &Group, options: &GroupOptions) -> Result<()> {
        let spec = options.backend.as_ref().unwrap_or(&self.config.backend);
        let deadline = Deadline::In(self.config.init_timeout).started();
        let mut factories = self.factories_of(spec)?.into_iter();
        factories.try_for_each(|factory| match parent.backend(factory.name()) {
            Some(backend) => backend.decline_split(deadline),
            None => Ok(()),
        })
    }

    pub(crate) fn make_group(
        self: &Arc<Self>,
        name: String,
        ranks: Vec<Rank>,
        options: &GroupOptions,
        origin: Origin<'_>,
    ) -> Result<ProcessGroup> {
        let place = &self.place;
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
        let prefix = format!("rcomm/{}/group/{wire_id:016x}", place.attempt);
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(prefix, self.root.clone()));
        let deadline = Deadline::In(self.config.init_timeout).started();
        if info.ranks.len() > 1 {
            let value = spec.as_bytes();
            let host = self.factories.first();
            let agreed = host.map_or(Ok(None), |host| {
                host.agree(wire_id, value, &info.ranks, group_rank, deadline)
            });
            let other = match agreed.map_err(named)? {
                Some(Agreement::Same) => None,
                Some(Agreement::Other(other)) => Some(other),
                None => {
                    let held = store.compare_set("backend", b"", value);
                    Some(held.map_err(named)?).filter(|held| held != value)
                }
            };
            if let Some(other) = other {
                return Err(named(Error::new(
                    ErrorKind::Rendezvous,
                    format!(
                        "this rank wants the backends {spec:?}, another member {:?}",
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
            };
            let derived = origin.derive(factory.name(), &context, deadline);
            let backend = match derived.map_err(named)? {
                Some(backend) => backend,
                None => factory.connect(context, deadline).map_err(named)?,
            };
            let beside = Beside {
                name: factory.name(),
                group_rank,
                store: &store,
                deadline,
            };
            let backend = self.wrap(backend, &info, beside).map_err(named)?;
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
            world: self.clone(),
        };
        Ok(ProcessGroup::over(Group::new(parts)))
    }

    /// Wraps this backend so that ranks compare what they issue to it, if the configuration asks for that.
    fn wrap(
        &self,
        backend: Arc<dyn Backend>,
        info: &ProcessGroupInfo,
        beside: Beside<'_>,
    ) -> Result<Arc<dyn Backend>> {
        let config = &self.config;
        if config.debug == DebugLevel::Off && config.nan_check == NanCheck::Off {
            return Ok(backend);
        }
        let name = format!("{}/{}/checks", info.name, beside.name);
        let side = GroupContext {
            group_rank: beside.group_rank,
            wire_id: wire_id(&name, &info.ranks, self.place.attempt),
            store: Arc::new(PrefixStore::new(
                format!("{}/checks", beside.name),
                beside.store.clone(),
            )),
            info: ProcessGroupInfo {
                name,
                ..info.clone()
            },
        };
        let host = self.factories.first().ok_or_else(|| {
            let message = "the ranks have no backend over which to compare what they issue";
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let side = host.connect(side, beside.deadline)?;
        let nan_check = config.nan_check;
        let wrapper = Wrapper::new(backend, side, &info.ranks, nan_check);
        Ok(Arc::new(wrapper))
    }

    /// The factories that a list such as `NAME` or `DEVICE:NAME,DEVICE:NAME` names.
    fn factories_of(&self, spec: &str) -> Result<Vec<&Arc<dyn BackendFactory>>> {
        let mut chosen: Vec<&Arc<dyn BackendFactory>> = Vec::new();
        for part in spec.split(',') {
            let (device, name) = match part.trim().split_once(':') {
                Some((device, name)) => (Some(device.trim()), name.trim()),
                None => (None, part.trim()),
            };
            let known = |factory: &&Arc<dyn BackendFactory>| factory.name() == name;
            let factory = self.factories.iter().find(known).ok_or_else(|| {
                let names: Vec<_> = self.factories.iter().map(|f| f.name()).collect();
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!(
                        "no backend is called {name:?}: there is {}",
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

/// What a backend needs to open in its group, besides the members.
struct Beside<'a> {
    name: &'static str,
    group_rank: u32,
    store: &'a Arc<dyn Store>,
    deadline: Deadline,
}

/// Distinguishes the traffic of groups on shared connections.
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

impl ProcessGroup {
    /// Splits this group: its members call this together, and those that name the same `color` form a
    /// new group, ordered by `key`, then by their rank here. A member without a color gets no group.
    ///
    /// # Blocking
    /// As an `all_gather` of this group.
    ///
    /// # Errors
    /// As [`World::new_group`](crate::World::new_group) and `all_gather`.
    #[track_caller]
    pub fn split(
        &self,
        color: Option<u32>,
        key: i64,
        options: &GroupOptions,
    ) -> Result<Option<ProcessGroup>> {
        let own = [color.map_or(-1, i64::from), key];
        let mut all = vec![0i64; 2 * self.size() as usize];
        self.all_gather_single(&own, &mut all)?;
        let world = self.group.world()?;
        let Some(color) = color else {
            world.decline_split(&self.group, options)?;
            return Ok(None);
        };
        let mut members: Vec<(i64, u32)> = (0..self.size())
            .zip(all.chunks_exact(2))
            .filter(|(_, theirs)| theirs[0] == i64::from(color))
            .map(|(group_rank, theirs)| (theirs[1], group_rank))
            .collect();
        members.sort_unstable();
        let ranks: Vec<Rank> = members
            .iter()
            .filter_map(|&(_, group_rank)| self.global_rank(group_rank))
            .collect();
        let origin = Origin::Split(&self.group);
        world.new_group(&ranks, options, origin).map(Some)
    }

    /// Splits this group into groups of `size` neighbours, and returns the caller's.
    ///
    /// # Errors
    /// `InvalidArgument` if `size` does not divide the size of this group.
    pub fn new_subgroups(&self, size: u32, options: &GroupOptions) -> Result<ProcessGroup> {
        if size == 0 || !self.size().is_multiple_of(size) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{} ranks do not divide into groups of {size}", self.size()),
            )
            .in_group(self.desc()));
        }
        let first = self.rank() / size * size;
        let ranks = &self.ranks()[first as usize..][..size as usize];
        let world = self.group.world()?;
        world.new_group(ranks, options, Origin::Split(&self.group))
    }

    /// Splits this group as listed: each list holds ranks of the world, in the order of the new group.
    /// All members call it with the same lists; a member in no list gets no group.
    ///
    /// # Errors
    /// `InvalidArgument` if a rank is in two lists or no member, or a list is empty, on all callers.
    pub fn new_subgroups_by_enumeration(
        &self,
        lists: &[Vec<Rank>],
        options: &GroupOptions,
    ) -> Result<Option<ProcessGroup>> {
        let refuse = |message: String| {
            Err(Error::new(ErrorKind::InvalidArgument, message).in_group(self.desc()))
        };
        let mut seen = Vec::new();
        for (at, list) in lists.iter().enumerate() {
            if list.is_empty() {
                return refuse(format!("list {at} of sub-groups is empty"));
            }
            for &rank in list {
                if self.group_rank(rank).is_none() {
                    return refuse(format!(
                        "rank {rank} in list {at} of sub-groups is no member"
                    ));
                }
                if seen.contains(&rank) {
                    return refuse(format!("rank {rank} is in the lists of sub-groups twice"));
                }
                seen.push(rank);
            }
        }
        let own = self.ranks()[self.rank() as usize];
        let world = self.group.world()?;
        let Some(list) = lists.iter().find(|list| list.contains(&own)) else {
            world.decline_split(&self.group, options)?;
            return Ok(None);
        };
        let origin = Origin::Split(&self.group);
        world.new_group(list, options, origin).map(Some)
    }
}

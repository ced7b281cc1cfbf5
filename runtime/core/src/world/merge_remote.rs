//! [`World::merge_remote`]: one world of the members of groups of different jobs.

use super::meeting::{Member, Met};
use super::merge_rounds::Rounds;
use super::{World, WorldBuilder};
use crate::backend::BackendSet;
use crate::config::Config;
use crate::config::rendezvous::{Launcher, Rendezvous};
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store};
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::{Rank, text};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// The most ranks that a message lists.
const MAX_RANKS: usize = 16;

/// A group that is to be merged, as its rank 0 publishes it.
#[derive(Serialize, Deserialize)]
struct Part {
    job: String,
    run: String,
    /// The members, as ranks of their job.
    ranks: Vec<Rank>,
    /// The [`host_name`], if all ranks of the job are known to be on it.
    host: Option<String>,
}

impl<B: BackendSet> World<B> {
    /// Makes a world of the members of several groups, which may be of different jobs, as `merge_remote_group` of
    /// PyTorch does. All members of these groups call this, each with the group that it is in, the same `purpose`, the
    /// same `store`, and `size`, the number of all members together. The [group](Self::group) of the new world has all
    /// of them. In it the old groups follow each other by the name of their job, those of one job by their smallest
    /// rank; the members of each keep their order. Old worlds and groups stay open.
    ///
    /// The merged world is a job of its own, named by the purpose: in records, too. It has this world's options, and
    /// the time-out of `group`. The store must answer until all members have left the new world. Of several merges for
    /// the same purpose at one store, the first calls of all groups belong together, then the second, and so on. The
    /// store may outlive the jobs: a group of a job that was restarted counts from the merges that have ended. Once all
    /// members have found each other, the last one removes the keys that they used for it. The keys of the new world,
    /// and a few numbers for each purpose and rank, stay below `merge/`.
    ///
    /// Jobs that do not share one host must reach each other: each rank publishes the address by which it reaches the
    /// store of its own job, or, if that is a loopback address, the host's first other address.
    /// [`Config::socket_ifname`] chooses another. If jobs were given secrets ([`Config::secret`]), it must be the same
    /// one.
    ///
    /// # Blocking
    /// Until rank 0 of each group has called this, for at most the group's time-out, and 2 s more if the store does not
    /// reply or a group is absent; then as [`WorldBuilder::init`].
    ///
    /// # Errors
    /// `InvalidArgument` if the purpose is empty or the name of one of the jobs, if the groups have more members than
    /// `size` (if the merge was complete with exactly `size` members, only the groups that come later get this error;
    /// otherwise all do), if other groups have completed the merge in which this one was to take part, or if a rank is
    /// in two of the groups. `Timeout` names the groups whose rank 0 had called this. All members get it, also those
    /// that had called for an earlier merge and arrive later; of groups that arrive later for the first time, the first
    /// one gets it. The next calls of all belong together again. Otherwise the store's error, or as
    /// [`WorldBuilder::init`]. A world whose backends or dump writer are the program's own needs
    /// [`merge_remote_with`](Self::merge_remote_with).
    pub fn merge_remote(
        &self,
        group: &ProcessGroup,
        size: u32,
        purpose: &str,
        store: Arc<dyn Store>,
    ) -> Result<Self> {
        let builder = Self::builder(Config {
            timeout: group.timeout(),
            ..Config::clone(&self.shared.config)
        });
        self.merge_remote_with(group, size, purpose, store, builder)
    }

    /// Like [`merge_remote`](Self::merge_remote), with the configuration, backends and dump writer of `builder`. Its
    /// store, its place in a job, [`Config::joins`] and [`Config::dump_pipes`] are not used: they belong to one world
    /// of a process.
    ///
    /// # Blocking
    /// See [`merge_remote`](Self::merge_remote).
    ///
    /// # Errors
    /// Those of [`merge_remote`](Self::merge_remote).
    pub fn merge_remote_with(
        &self,
        group: &ProcessGroup,
        size: u32,
        purpose: &str,
        store: Arc<dyn Store>,
        mut builder: WorldBuilder<B>,
    ) -> Result<Self> {
        if purpose.is_empty() {
            return Err(refused("a merge needs a purpose, which names the new job"));
        }
        let own = &self.shared.place;
        let part = Part {
            job: own.job.clone(),
            run: self.shared.run.clone(),
            ranks: group.ranks().to_vec(),
            host: own.is_on_one_host().then(host_name).flatten(),
        };
        let member = Member::of(group);
        let name = format!("{}/{}/{:016x}", part.job, part.run, group.group.wire_id());
        let entry = serde_json::to_string(&part).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "the group cannot be published")
                .with_source(error)
        })?;
        let rounds = Rounds {
            store: store.clone(),
            purpose: purpose.to_owned(),
            member,
        };
        let rank = own.rank;
        let (meeting, met) = member.meet(&store, move || {
            let round = rounds.next(&name, rank)?;
            let meeting = rounds.meeting(round);
            let met = meeting.hold(member, &entry, size)?;
            if member.rank == 0 && matches!(met, Met::All(_)) {
                rounds.end(round)?;
            }
            Ok((meeting, met))
        })?;
        let entries = match met {
            Met::All(entries) => entries,
            Met::Late { error, arrived } => {
                let arrived = read(&arrived).unwrap_or_default();
                return Err(error.with_more(&arrived_text(&arrived, purpose, size)));
            }
            Met::Over => return Err(complete_without(&part, purpose, "its members have left it")),
        };
        let parts = read(&entries)?;
        if parts.iter().any(|found| found.is_same_as(&part)) {
            meeting.leave(parts.iter().map(|part| part.ranks.len()).sum());
        }
        let prefix = meeting.prefix();
        let parts = in_order(parts, purpose, size)?;
        let first = first_rank(&parts, &part, purpose)?;
        builder.config.rendezvous = Some(Rendezvous {
            launcher: Launcher::Explicit,
            rank: first.saturating_add(group.rank()),
            world_size: size,
            local_rank: own.local_rank,
            local_world_size: local_members(&parts, &part),
            master_addr: match is_one_host(&parts) {
                true => "127.0.0.1".to_owned(),
                // The address of a store that only this host reaches leads to no other host.
                false if own.is_on_one_host() => "0.0.0.0".to_owned(),
                false => own.master_addr.clone(),
            },
            master_port: own.master_port,
            job: purpose.to_owned(),
            attempt: 0,
            uses_agent_store: true,
        });
        builder.config.joins = false;
        builder.config.dump_pipes.clear();
        let own_keys = PrefixStore::new(format!("{prefix}/world"), store);
        builder.store(Arc::new(own_keys)).init()
    }
}

impl Part {
    fn describe(&self) -> String {
        let ranks = text::ranks(&self.ranks, MAX_RANKS);
        format!("{ranks} of job {:?}", self.job)
    }

    fn is_same_as(&self, other: &Self) -> bool {
        (&self.job, &self.run, &self.ranks) == (&other.job, &other.run, &other.ranks)
    }
}

/// How many of the ranks that are to be merged have arrived, and which groups.
fn arrived_text(arrived: &[Part], purpose: &str, size: u32) -> String {
    let count: usize = arrived.iter().map(|part| part.ranks.len()).sum();
    let have = if count == 1 { "has" } else { "have" };
    let text =
        format!("of {size} ranks that are to be merged for {purpose:?}, {count} {have} arrived");
    if arrived.is_empty() {
        return text;
    }
    let named: Vec<String> = arrived.iter().map(Part::describe).collect();
    format!("{text}: {}", named.join("; "))
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

fn read(entries: &[String]) -> Result<Vec<Part>> {
    let read = entries.iter().map(|entry| serde_json::from_str(entry));
    read.collect::<std::result::Result<_, _>>()
        .map_err(|error| {
            let message = "the store holds something else among the groups that are to be merged: another program \
                           may have written to it";
            Error::new(ErrorKind::Store, message).with_source(error)
        })
}

/// The groups in the order of their members in the new world.
fn in_order(mut parts: Vec<Part>, purpose: &str, size: u32) -> Result<Vec<Part>> {
    let named: Vec<String> = parts.iter().map(Part::describe).collect();
    let count: usize = parts.iter().map(|part| part.ranks.len()).sum();
    if count != size as usize {
        return Err(refused(format!(
            "the groups that are to be merged for {purpose:?} have {count} members, not {size}: {}",
            named.join("; ")
        )));
    }
    if parts.iter().any(|part| part.job == purpose) {
        return Err(refused(format!(
            "the purpose of a merge names the new job, and {purpose:?} is the name of one that is merged"
        )));
    }
    let mut seen = HashSet::new();
    for part in &parts {
        for &rank in &part.ranks {
            if !seen.insert((&part.job, &part.run, rank)) {
                return Err(refused(format!(
                    "rank {rank} of job {:?} is in two of the groups that are to be merged: {}",
                    part.job,
                    named.join("; ")
                )));
            }
        }
    }
    parts.sort_by(|a, b| {
        let key = |part: &Part| part.ranks.iter().min().copied();
        (&a.job, key(a)).cmp(&(&b.job, key(b)))
    });
    Ok(parts)
}

/// The rank in the new world of the first member of this part.
fn first_rank(parts: &[Part], own: &Part, purpose: &str) -> Result<u32> {
    let Some(at) = parts.iter().position(|part| part.is_same_as(own)) else {
        let named: Vec<String> = parts.iter().map(Part::describe).collect();
        let reason = format!("it has {}", named.join("; "));
        return Err(complete_without(own, purpose, &reason));
    };
    let before: usize = parts[..at].iter().map(|part| part.ranks.len()).sum();
    Ok(u32::try_from(before).unwrap_or(u32::MAX))
}

fn complete_without(own: &Part, purpose: &str, reason: &str) -> Error {
    refused(format!(
        "the merge for {purpose:?} is complete without {}: {reason}. Either more groups call it than have the stated \
         number of members, or an earlier merge for this purpose is still in the store: call again, or merge for \
         another purpose",
        own.describe()
    ))
}

/// Whether all ranks of these groups are known to be on one host.
fn is_one_host(parts: &[Part]) -> bool {
    let mut hosts = parts.iter().map(|part| &part.host);
    let first = hosts.next().cloned().flatten();
    first.is_some() && hosts.all(|host| *host == first)
}

/// How many members are on the host of this part. `None` if that is not known of all, or if all of them are.
fn local_members(parts: &[Part], own: &Part) -> Option<u32> {
    if is_one_host(parts) || parts.iter().any(|part| part.host.is_none()) {
        return None;
    }
    let here = parts.iter().filter(|part| part.host == own.host);
    u32::try_from(here.map(|part| part.ranks.len()).sum::<usize>()).ok()
}

/// A name that processes have in common only if a loopback address of one leads to the other: they run under one
/// kernel, in the same namespaces (so not in different containers), for one user.
fn host_name() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = std::fs::metadata("/proc/self/ns/net").ok()?.ino();
    let processes = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let user = rustix::process::geteuid().as_raw();
    Some(format!("{} {network} {processes} {user}", boot.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(job: &str, ranks: &[Rank], host: Option<&str>) -> Part {
        Part {
            job: job.to_owned(),
            run: "1".to_owned(),
            ranks: ranks.to_vec(),
            host: host.map(ToOwned::to_owned),
        }
    }

    #[test]
    fn groups_follow_each_other_by_job_and_smallest_rank_and_each_rank_is_there_once() {
        let parts = || {
            vec![
                part("b", &[0], None),
                part("a", &[3, 2], None),
                part("a", &[1, 0], None),
            ]
        };
        let ordered = in_order(parts(), "both", 5).unwrap();
        let ranks: Vec<_> = ordered.iter().map(|part| part.ranks.clone()).collect();
        assert_eq!(ranks, [vec![1, 0], vec![3, 2], vec![0]]);
        let text = |size, purpose| in_order(parts(), purpose, size).err().unwrap().to_string();
        assert_eq!(
            text(4, "both"),
            "the groups that are to be merged for \"both\" have 5 members, not 4: rank 0 of job \"b\"; ranks 3, 2 of \
             job \"a\"; ranks 1, 0 of job \"a\""
        );
        assert!(text(5, "a").contains("\"a\" is the name of one that is merged"));
        let twice = vec![part("a", &[0, 1], None), part("a", &[1], None)];
        let error = in_order(twice, "both", 3).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("rank 1 of job \"a\" is in two of the groups"),
            "{error}"
        );
    }

    #[test]
    fn the_groups_that_have_arrived_are_listed_unless_none_has() {
        assert_eq!(
            arrived_text(&[], "both", 2),
            "of 2 ranks that are to be merged for \"both\", 0 have arrived"
        );
        assert_eq!(
            arrived_text(&[part("a", &[3], None)], "both", 2),
            "of 2 ranks that are to be merged for \"both\", 1 has arrived: rank 3 of job \"a\""
        );
    }

    #[test]
    fn a_group_that_is_not_in_the_merge_has_no_rank_there() {
        let parts = [part("a", &[0, 1], None), part("b", &[0], None)];
        assert_eq!(first_rank(&parts, &parts[1], "both").unwrap(), 2);
        let mut other = part("b", &[0], None);
        other.run = "2".to_owned();
        let error = first_rank(&parts, &other, "both").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(
            text.contains("complete without rank 0 of job \"b\""),
            "{text}"
        );
    }

    #[test]
    fn members_of_this_host_are_counted_only_if_every_host_is_known() {
        let (x, y) = (Some("x"), Some("y"));
        let here = part("a", &[0, 1], x);
        let members_with = |others: [Option<&str>; 2]| {
            let [second, third] = others.map(|host| part("b", &[0], host));
            local_members(&[part("a", &[0, 1], x), second, third], &here)
        };
        assert_eq!(members_with([x, y]), Some(3));
        assert_eq!(members_with([y, y]), Some(2));
        assert_eq!(members_with([y, None]), None);
        // The whole world is on this host.
        assert_eq!(members_with([x, x]), None);
    }

    #[test]
    fn groups_are_on_one_host_only_if_all_of_them_are_known_to_be_on_it() {
        let is_one = |hosts: &[Option<&str>]| {
            let parts: Vec<Part> = hosts.iter().map(|host| part("a", &[0], *host)).collect();
            is_one_host(&parts)
        };
        assert!(is_one(&[Some("x"), Some("x")]));
        assert!(!is_one(&[Some("x"), Some("y")]));
        assert!(!is_one(&[Some("x"), None]));
        assert!(!is_one(&[None, None]));
    }
}

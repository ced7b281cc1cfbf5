//! [`World::merge`]: one group of the members of several groups of a world.

use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::world::World;
use crate::world::meeting::{Member, MergeMeeting, Met};
use rcomm_recorder::model::{Rank, text};
use std::sync::PoisonError;

impl<B> World<B> {
    /// Makes one group of the members of several groups of this world that do not know each other; for groups of
    /// different jobs see [`merge_remote`](Self::merge_remote). All members of these groups call this, each with the
    /// group that it is in, the same purpose ([`GroupOptions::desc`]), and `size`, the number of all members together.
    /// In the new group the old groups follow each other by their smallest rank in the world; the members of each keep
    /// their order. The old groups stay open.
    ///
    /// Of several merges for the same purpose, the first calls of all groups belong together, then the second, and so
    /// on.
    ///
    /// # Blocking
    /// Until rank 0 of each group has called this, for at most the group's time-out, and 2 s more if the store does not
    /// reply or a group is absent; then as [`new_group`](Self::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if the options name no purpose, if the groups have more members than `size` (if the merge was
    /// complete with exactly `size` members, only the groups that come later get this error; otherwise all do), or if a
    /// rank is in two of the groups. `Timeout` names the members of the groups whose rank 0 had called this. All
    /// members get it, also those that arrive later, and the next calls of all belong together again. Otherwise as
    /// [`new_group`](Self::new_group), or the store's error.
    pub fn merge(
        &self,
        group: &ProcessGroup,
        size: u32,
        options: &GroupOptions,
    ) -> Result<ProcessGroup> {
        let desc = options.desc.as_str();
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, message);
            Err(error.in_group(if desc.is_empty() { "(new)" } else { desc }))
        };
        if desc.is_empty() {
            return refuse("a merge needs a description of its purpose in its options".to_owned());
        }
        let nth = {
            let made = &self.shared.made;
            let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (format!("merge/{desc}"), group.ranks().to_vec());
            let count = made.entry(key).or_default();
            *count += 1;
            i64::from(*count)
        };
        let meeting = MergeMeeting {
            store: self.shared.root.clone(),
            purpose: desc.to_owned(),
            round: nth,
        };
        let ranks: Vec<String> = group.ranks().iter().map(Rank::to_string).collect();
        let (member, held) = (Member::of(group), meeting.clone());
        let met = member.meet(&self.shared.root, move || {
            held.hold(member, &ranks.join(","), size)
        });
        let lists = match met? {
            Met::All(lists) => lists,
            Met::Late { error, arrived } => {
                let arrived = parse(&arrived).concat();
                let count = arrived.len();
                let have = if count == 1 { "has" } else { "have" };
                let mut message =
                    format!("of {size} ranks that are to be merged, {count} {have} arrived");
                if count > 0 {
                    message += &format!(": {}", text::ranks(&arrived, 64));
                }
                return Err(error.with_more(&message));
            }
            Met::Over => {
                let this = text::ranks(group.ranks(), 64);
                return refuse(format!(
                    "the merge is complete without this group, {this}: its members have left it"
                ));
            }
        };
        let mut groups = parse(&lists);
        groups.sort_by_key(|ranks| ranks.iter().min().copied());
        let ranks = groups.concat();
        let is_member = groups.iter().any(|ranks| ranks == group.ranks());
        if is_member {
            meeting.leave(ranks.len());
        }
        let named: Vec<String> = groups.iter().map(|ranks| text::ranks(ranks, 64)).collect();
        let named = named.join("; ");
        if ranks.len() != size as usize {
            let count = ranks.len();
            return refuse(format!(
                "the groups that were merged have {count} members, not {size}: {named}"
            ));
        }
        if !is_member {
            let this = text::ranks(group.ranks(), 64);
            return refuse(format!(
                "the merge is complete without this group, {this}: it has {named}"
            ));
        }
        self.new_group(&ranks, options)
    }
}

/// The ranks of each group in entries as `0,1`.
fn parse(entries: &[String]) -> Vec<Vec<Rank>> {
    let groups = entries.iter().map(|entry| entry.split(','));
    groups
        .map(|ranks| ranks.filter_map(|rank| rank.parse().ok()).collect())
        .collect()
}

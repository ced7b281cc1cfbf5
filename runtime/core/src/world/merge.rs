//! [`World::merge`]: one group of the members of several groups of a world; and how such groups find each other.

use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::Store;
use crate::world::World;
use rcomm_recorder::model::{Rank, text};
use std::sync::PoisonError;

impl<B> World<B> {
    /// Makes one group of the members of several groups of this world that do not know each other; for groups of different
    /// jobs see [`merge_remote`](Self::merge_remote). All members of these groups call this, each with the group that it is in, the same purpose
    /// ([`GroupOptions::desc`]), and `size`, the number of all members together. In the new group the old groups follow
    /// each other by their smallest rank in the world; the members of each keep their order. The old groups stay open.
    ///
    /// Of several merges for the same purpose, the first calls of all groups belong together, then the second, and so
    /// on.
    ///
    /// # Blocking
    /// Until rank 0 of each group has called this, for the group's time-out at most; then as
    /// [`new_group`](Self::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if the options name no purpose, if the groups have more members than `size` (groups that come when
    /// `size` members have come get it; the others do, too, unless the merge was complete before), or if a rank is in two
    /// of the groups. `Timeout` names the members of the groups whose rank 0 had called this; all members get it, also those
    /// that come later, and the next calls of all belong together again. Otherwise as
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
            *count
        };
        let store: &dyn Store = &*self.shared.root;
        let ranks: Vec<String> = group.ranks().iter().map(Rank::to_string).collect();
        let met = meet(
            store,
            &format!("merge/{desc}/{nth}"),
            group,
            &ranks.join(","),
            size,
        );
        let lists = met.map_err(|missed| {
            let arrived = parse(&missed.arrived).concat();
            let message = format!(
                "of {size} ranks that are to be merged, {} have come: {}",
                arrived.len(),
                text::ranks(&arrived, 64)
            );
            missed.error.with_more(&message)
        })?;
        let mut groups = parse(&lists);
        groups.sort_by_key(|ranks| ranks.iter().min().copied());
        let ranks = groups.concat();
        if ranks.len() != size as usize {
            let count = ranks.len();
            return refuse(format!(
                "the groups that were merged have {count} members, not {size}: {groups:?}"
            ));
        }
        if !groups.iter().any(|ranks| ranks == group.ranks()) {
            return refuse(format!(
                "the merge is complete without this group, {:?}: {groups:?}",
                group.ranks()
            ));
        }
        self.new_group(&ranks, options)
    }
}

/// Begins the result where a member has reached its deadline before all groups had come.
pub(super) const GIVEN_UP: &str = "given up\n";

/// Groups that are to be merged did not find each other.
pub(super) struct Missed {
    pub(super) error: Error,
    /// The entries of the groups whose rank 0 had come.
    pub(super) arrived: Vec<String>,
}

impl From<Error> for Missed {
    fn from(error: Error) -> Self {
        Self {
            error,
            arrived: Vec::new(),
        }
    }
}

/// Publishes this group's entry, a text of one line, below `prefix`, and returns the entries of all groups, in the order
/// in which their ranks 0 have called this, once these groups have `size` members together. All members call this. The
/// first that reaches its deadline gives the merge up for all, also for groups that come later.
pub(super) fn meet(
    store: &dyn Store,
    prefix: &str,
    group: &ProcessGroup,
    entry: &str,
    size: u32,
) -> std::result::Result<Vec<String>, Missed> {
    let key = |part: &str| format!("{prefix}/{part}");
    let (list, count, whole) = (key("list"), key("count"), key("whole"));
    if group.rank() == 0 {
        store.append(&list, format!("{entry}\n").as_bytes())?;
        // Each group adds its entry before it is counted, so the last one finds all of them.
        if store.add(&count, group.size().into())? >= size.into() {
            let entries = store.get(&list, group.timeout())?;
            store.compare_set(&whole, b"", &entries)?;
        }
    }
    let (result, error) = match store.get(&whole, group.timeout()) {
        Ok(result) => {
            let message = "the merge was given up before all groups had come";
            (result, Error::new(ErrorKind::Timeout, message))
        }
        Err(error) if error.kind() == ErrorKind::Timeout => {
            let has_begun = store.check(&[&list])?;
            let arrived = match has_begun {
                true => store.get(&list, group.timeout())?,
                false => Vec::new(),
            };
            let given_up = [GIVEN_UP.as_bytes(), &arrived].concat();
            (store.compare_set(&whole, b"", &given_up)?, error)
        }
        Err(error) => return Err(error.into()),
    };
    let result = String::from_utf8_lossy(&result);
    let lines = |text: &str| text.lines().map(str::to_owned).collect();
    match result.strip_prefix(GIVEN_UP) {
        None => Ok(lines(&result)),
        Some(arrived) => Err(Missed {
            error,
            arrived: lines(arrived),
        }),
    }
}

/// The ranks of each group in entries as `0,1`.
fn parse(entries: &[String]) -> Vec<Vec<Rank>> {
    let groups = entries.iter().map(|entry| entry.split(','));
    groups
        .map(|ranks| ranks.filter_map(|rank| rank.parse().ok()).collect())
        .collect()
}

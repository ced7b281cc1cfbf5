//! [`World::merge`]: one group of the members of several groups.

use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::Store;
use crate::world::World;
use rcomm_recorder::model::{Rank, text};
use std::sync::PoisonError;

impl<B> World<B> {
    /// Makes one group of the members of several groups that do not know each other, as `merge_remote_group` of
    /// PyTorch. All members of these groups call this, each with the group that it is in, the same purpose
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
    /// `InvalidArgument` if the options name no purpose, if the groups have more members than `size`, or if a rank is
    /// in two of the groups. `Timeout` names the members of the groups whose rank 0 has called this. Otherwise as
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
        let key = |part: &str| format!("merge/{desc}/{nth}/{part}");
        let (list, count, merged) = (key("list"), key("count"), key("whole"));
        let store: &dyn Store = &*self.shared.root;
        if group.rank() == 0 {
            let ranks: Vec<String> = group.ranks().iter().map(Rank::to_string).collect();
            store.append(&list, format!("{};", ranks.join(",")).as_bytes())?;
            // Each group adds its list before it is counted, so the last one finds all of them.
            if store.add(&count, group.size().into())? >= size.into() {
                let lists = store.get(&list, group.timeout())?;
                store.set(&merged, &lists)?;
            }
        }
        if let Err(error) = store.wait(&[&merged], group.timeout()) {
            let has_begun = store.check(&[&list]).unwrap_or(false);
            let arrived = match has_begun {
                true => store.get(&list, group.timeout()).unwrap_or_default(),
                false => Vec::new(),
            };
            let arrived = parse(&arrived).concat();
            let message = format!(
                "of {size} ranks that are to be merged, {} have come: {}",
                arrived.len(),
                text::ranks(&arrived, 64)
            );
            return Err(error.with_more(&message));
        }
        let mut groups = parse(&store.get(&merged, group.timeout())?);
        groups.sort_by_key(|ranks| ranks.iter().min().copied());
        let ranks = groups.concat();
        if ranks.len() != size as usize {
            let count = ranks.len();
            return refuse(format!(
                "the groups that were merged have {count} members, not {size}: {groups:?}"
            ));
        }
        self.new_group(&ranks, options)
    }
}

/// The ranks of each group in a list as `0,1;2,3;`.
fn parse(list: &[u8]) -> Vec<Vec<Rank>> {
    let list = String::from_utf8_lossy(list);
    let groups = list.split(';').filter(|group| !group.is_empty());
    groups
        .map(|group| {
            let ranks = group.split(',').filter_map(|rank| rank.parse().ok());
            ranks.collect()
        })
        .collect()
}

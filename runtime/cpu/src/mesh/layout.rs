//! Which ranks of a group share memory with each other.

/// The ranks of a group, by host. All ranks compute the same layout, except for the field `rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The ranks of each host, in order; the hosts are in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
    /// The index of each rank's host, and the rank's index on its host.
    hosts_and_indices: Vec<(usize, usize)>,
    /// This rank in the group.
    rank: usize,
}

impl Layout {
    /// Makes the layout from the names of the ranks' hosts: ranks with the same name share memory, and a rank whose
    /// host has no name shares memory with no other. `rank` is this rank.
    pub(crate) fn new<N: PartialEq>(names: &[Option<N>], rank: usize) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let mut hosts_and_indices = Vec::with_capacity(names.len());
        for (member, name) in names.iter().enumerate() {
            let known = hosts
                .iter()
                .position(|host| name.is_some() && names[host[0]] == *name);
            let host = known.unwrap_or(hosts.len());
            if known.is_none() {
                hosts.push(Vec::new());
            }
            hosts_and_indices.push((host, hosts[host].len()));
            hosts[host].push(member);
        }
        Self {
            hosts,
            hosts_and_indices,
            rank,
        }
    }

    /// Number of hosts.
    pub(crate) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Index of this rank's host.
    pub(crate) fn host(&self) -> usize {
        self.hosts_and_indices[self.rank].0
    }

    /// This rank's index among the ranks of its host.
    pub(crate) fn index_on_host(&self) -> usize {
        self.hosts_and_indices[self.rank].1
    }

    /// The index of a rank's host, and the rank's index on its host.
    pub(crate) fn host_and_index(&self, rank: usize) -> (usize, usize) {
        self.hosts_and_indices[rank]
    }

    /// The ranks of a host.
    pub(crate) fn ranks_of(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The ranks of this host.
    pub(crate) fn neighbors(&self) -> &[usize] {
        &self.hosts[self.host()]
    }

    /// The first rank of each host.
    pub(crate) fn leaders(&self) -> Vec<usize> {
        self.hosts.iter().map(|host| host[0]).collect()
    }

    /// Number of ranks on the host with the fewest ranks.
    pub(crate) fn fewest_ranks(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Whether there is more than one host, and one of them has several ranks.
    pub(crate) fn is_nested(&self) -> bool {
        self.hosts.len() > 1 && self.hosts.len() < self.hosts_and_indices.len()
    }

    /// Whether all ranks of a host come before all ranks of the next host.
    pub(crate) fn is_in_order(&self) -> bool {
        self.hosts.iter().flatten().copied().is_sorted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_in_the_order_of_their_first_ranks() {
        let layout = Layout::new(&[Some("b"), Some("a"), Some("b"), None, None], 2);
        assert_eq!(layout.hosts(), 4);
        assert_eq!(layout.neighbors(), [0, 2]);
        assert_eq!((layout.host(), layout.index_on_host()), (0, 1));
        assert_eq!(layout.leaders(), [0, 1, 3, 4]);
        assert_eq!(layout.host_and_index(4), (3, 0));
        assert_eq!(layout.fewest_ranks(), 1);
        assert!(layout.is_nested() && !layout.is_in_order());
    }

    #[test]
    fn ranks_are_in_order_if_those_of_each_host_are_consecutive() {
        let nested = Layout::new(&[Some(7), Some(7), Some(1), Some(1)], 0);
        assert!(nested.is_in_order() && nested.is_nested());
        let alone = Layout::new::<u8>(&[None, None], 1);
        assert!(alone.is_in_order() && !alone.is_nested());
        let together = Layout::new(&[Some(1), Some(1)], 1);
        assert!(together.is_in_order() && !together.is_nested());
    }
}

//! Which ranks of a group share memory with each other.

/// The ranks of a group by host. All ranks compute the same layout, except for the field `rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Ranks of the group, in order; hosts in the order of their first ranks.
    hosts: Vec<Vec<usize>>,
    /// Each rank's host and its place there.
    places: Vec<(usize, usize)>,
    rank: usize,
}

impl Layout {
    /// Ranks whose hosts have the same name share memory; a rank whose host has no name is alone.
    pub(crate) fn new<N: PartialEq>(names: &[Option<N>], rank: usize) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let mut places = Vec::with_capacity(names.len());
        for (at, name) in names.iter().enumerate() {
            let known = hosts
                .iter()
                .position(|host| name.is_some() && names[host[0]] == *name);
            let host = known.unwrap_or(hosts.len());
            if known.is_none() {
                hosts.push(Vec::new());
            }
            places.push((host, hosts[host].len()));
            hosts[host].push(at);
        }
        Self {
            hosts,
            places,
            rank,
        }
    }

    /// Number of hosts.
    pub(crate) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Index of this rank's host.
    pub(crate) fn host(&self) -> usize {
        self.places[self.rank].0
    }

    /// This rank's place among those of its host.
    pub(crate) fn place(&self) -> usize {
        self.places[self.rank].1
    }

    /// The index of a rank's host, and the rank's place there.
    pub(crate) fn place_of(&self, rank: usize) -> (usize, usize) {
        self.places[rank]
    }

    /// The ranks of a host.
    pub(crate) fn ranks_of(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The ranks of this host.
    pub(crate) fn neighbours(&self) -> &[usize] {
        &self.hosts[self.host()]
    }

    /// The first rank of each host.
    pub(crate) fn leaders(&self) -> Vec<usize> {
        self.hosts.iter().map(|host| host[0]).collect()
    }

    /// Number of ranks of the host that has the fewest.
    pub(crate) fn fewest(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Whether there is more than one host, and one of them has several ranks.
    pub(crate) fn is_nested(&self) -> bool {
        self.hosts.len() > 1 && self.hosts.len() < self.places.len()
    }

    /// Whether all ranks of a host come before all of the next.
    pub(crate) fn is_in_order(&self) -> bool {
        self.hosts.iter().flatten().copied().is_sorted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_sorted_by_host_in_the_order_of_their_first() {
        let layout = Layout::new(&[Some("b"), Some("a"), Some("b"), None, None], 2);
        assert_eq!(layout.hosts(), 4);
        assert_eq!(layout.neighbours(), [0, 2]);
        assert_eq!((layout.host(), layout.place()), (0, 1));
        assert_eq!(layout.leaders(), [0, 1, 3, 4]);
        assert_eq!(layout.place_of(4), (3, 0));
        assert_eq!(layout.fewest(), 1);
        assert!(layout.is_nested() && !layout.is_in_order());
    }

    #[test]
    fn hosts_are_in_order_if_each_one_follows_the_one_before() {
        let nested = Layout::new(&[Some(7), Some(7), Some(1), Some(1)], 0);
        assert!(nested.is_in_order() && nested.is_nested());
        let alone = Layout::new::<u8>(&[None, None], 1);
        assert!(alone.is_in_order() && !alone.is_nested());
        let together = Layout::new(&[Some(1), Some(1)], 1);
        assert!(together.is_in_order() && !together.is_nested());
    }
}

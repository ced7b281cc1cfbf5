//! The hosts of a job, with their records and ranks.

use crate::align::{Aligned, RecordIx};
use rcomm_recorder::model::Rank;

/// The hosts of a job by the names in its records. A host is an index into their names, ascending.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hosts {
    names: Vec<String>,
    /// The host of each record; `None` if the record does not name it.
    of_record: Vec<Option<usize>>,
    /// The ranks of each host, ascending.
    ranks: Vec<Vec<Rank>>,
    /// The number of hosts; 0 if a record does not name its host.
    count: usize,
}

impl Hosts {
    /// The hosts that the records name.
    pub(super) fn new(aligned: &Aligned<'_>) -> Self {
        let name_of = |record: RecordIx| aligned.records[record].identity.host.as_str();
        let mut named: Vec<(&str, RecordIx)> = (0..aligned.records.len())
            .map(|record| (name_of(record), record))
            .filter(|(name, _)| !name.is_empty())
            .collect();
        named.sort_unstable();
        let mut hosts = Self {
            of_record: vec![None; aligned.records.len()],
            ..Self::default()
        };
        for (name, record) in named {
            if hosts.names.last().is_none_or(|last| last != name) {
                hosts.names.push(name.to_owned());
                hosts.ranks.push(Vec::new());
            }
            let host = hosts.names.len() - 1;
            hosts.of_record[record] = Some(host);
            hosts.ranks[host].push(aligned.records[record].rank);
        }
        hosts.ranks.iter_mut().for_each(Vec::dedup);
        if !hosts.of_record.contains(&None) {
            hosts.count = hosts.names.len();
        }
        hosts
    }

    /// The number of hosts; 0 if a record does not name its host: then hosts cannot be compared.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn name(&self, host: usize) -> &str {
        &self.names[host]
    }

    /// The host of a record; `None` if the record does not name it.
    pub(crate) fn of(&self, record: RecordIx) -> Option<usize> {
        self.of_record[record]
    }

    /// The ranks of a host, ascending.
    pub(crate) fn ranks(&self, host: usize) -> &[Rank] {
        &self.ranks[host]
    }
}

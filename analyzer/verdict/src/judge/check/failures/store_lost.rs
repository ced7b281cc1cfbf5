//! E153: the store no longer answers: its host is gone, frozen or cut off.
//!
//! A rank asks the store several times a second, and records since when a request waits. One rank alone may be cut off
//! itself, so at least two, and most of those that asked, must agree.

use crate::align::record::Record;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;
use crate::report::format::{format_ranks, format_time, time_of_day};
use rcomm_recorder::model::{LinkEnd, PeerLink, Rank};

pub(crate) struct StoreLost;

/// A store answers in microseconds: a request that has waited for this long, ns, is unanswered.
const SILENT_NS: i64 = 2_000_000_000;

impl Check for StoreLost {
    fn codes(&self) -> &'static [Code] {
        &[Code::E153]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let records = ctx.aligned.records.iter().enumerate();
        let asked: Vec<Asked> = records
            .filter_map(|(index, record)| {
                let link = store_link(record)?;
                Some(Asked {
                    rank: record.rank,
                    end: link.end,
                    since_ns: link
                        .waited_since_ns
                        .saturating_sub(ctx.aligned.offsets_ns[index]),
                    silent_ns: silence(record, link),
                })
            })
            .collect();
        let silent: Vec<&Asked> = asked
            .iter()
            .filter(|asker| asker.silent_ns >= SILENT_NS)
            .collect();
        if silent.len() < 2 || silent.len() * 2 <= asked.len() {
            return Vec::new();
        }
        let explained = so_far.iter().any(|draft| draft.is_root);
        vec![draft(&silent, asked.len(), explained)]
    }
}

/// What the record of one rank shows of the store.
struct Asked {
    rank: Rank,
    end: LinkEnd,
    /// Since when the rank's request waits, common time, ns.
    since_ns: i64,
    /// For how long the request had waited at the newest round of the rank's watchdog, ns; 0 if none waits.
    silent_ns: i64,
}

/// The connection to the store in a record; `None` if it has none.
fn store_link(record: &Record) -> Option<&PeerLink> {
    let is_store = |link: &&PeerLink| match link.end {
        LinkEnd::StoreAtRank(_) | LinkEnd::Store => true,
        LinkEnd::Rank(_) => false,
    };
    record.peers.iter().find(is_store)
}

/// For how long the request of a rank had waited at the newest round of its watchdog, ns; 0 if none waits.
fn silence(record: &Record, link: &PeerLink) -> i64 {
    // A process that is stopped, or has ended, waits for nothing, so only its time up to the watchdog's last round
    // counts.
    let until = record
        .status
        .as_ref()
        .map_or(0, |status| status.heartbeat_ns);
    match link.waited_since_ns {
        0 => 0,
        since => until.saturating_sub(since).max(0),
    }
}

/// The finding on the store. `asked`: the number of ranks that asked it; `explained`: whether another finding explains
/// the waits.
fn draft(silent: &[&Asked], asked: usize, explained: bool) -> FindingDraft {
    let ranks: Vec<Rank> = silent.iter().map(|asker| asker.rank).collect();
    let longest = silent
        .iter()
        .map(|asker| asker.silent_ns)
        .max()
        .unwrap_or(0);
    let since = silent.iter().map(|asker| asker.since_ns).min().unwrap_or(0);
    let (whose, culprits, next) = match silent[0].end {
        LinkEnd::StoreAtRank(rank) | LinkEnd::Rank(rank) => (
            format!("the store, which rank {rank} serves, had"),
            vec![rank],
            format!(
                "look at the process and the host of rank {rank}: is it there, stopped, reachable?"
            ),
        ),
        LinkEnd::Store => (
            "the store had".to_owned(),
            Vec::new(),
            "look at what serves the store, such as the launcher, and at its host: is it there, stopped, reachable?"
                .to_owned(),
        ),
    };
    let sentence = format!(
        "{whose} not answered {} of the {asked} ranks that asked it ({}) since {}, for {}",
        silent.len(),
        format_ranks(&ranks),
        time_of_day(since),
        format_time(longest as f64 / 1e6),
    );
    let mut draft = FindingDraft::new(Code::E153, sentence);
    draft.confidence = 0.9;
    draft.culprits = culprits;
    draft.age_ms = Some(longest as f64 / 1e6);
    draft.is_root = !explained;
    draft.ruled_out.push(
        "unreachable: most of the ranks that asked the store had no answer, not one alone"
            .to_owned(),
    );
    draft.next = next;
    draft
}

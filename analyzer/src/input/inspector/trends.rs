//! Computes trends: how the times of operations change over a log.

use super::MAX_SAMPLES;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// The calls of one function with one message size on one communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OperationKind {
    /// NCCL's number of the communicator.
    pub(super) communicator: String,
    /// The communicator's name; empty if it was not logged.
    pub(super) name: String,
    /// The number of ranks of the communicator.
    pub(super) ranks: u32,
    /// NCCL's function, such as `AllReduce`.
    pub(super) function: String,
    /// The size of the message, bytes.
    pub(super) bytes: u64,
}

/// What one record states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// The time of the operation, µs.
    pub(super) us: f32,
    /// The bus bandwidth, GB/s; negative if it was not logged.
    pub(super) bus_gbs: f32,
}

/// The records of one kind of operation on one rank, in the order of the log, thinned out evenly.
#[derive(Debug, Default)]
pub(super) struct Series {
    /// The number of records, also of those that are not kept.
    records: u64,
    /// Of every `1 << thinned` records, the first is kept.
    thinned: u32,
    samples: Vec<Sample>,
}

impl Series {
    pub(super) fn add(&mut self, sample: Sample) {
        let is_kept = self.records & ((1 << self.thinned) - 1) == 0;
        self.records += 1;
        if !is_kept {
            return;
        }
        self.samples.push(sample);
        if self.samples.len() == MAX_SAMPLES {
            let mut position = 0;
            self.samples.retain(|_| {
                position += 1;
                position % 2 == 1
            });
            self.thinned += 1;
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.samples.len()
    }

    fn trend(&self, rank: u32) -> RankTrend {
        let us = |samples: &[Sample]| median(samples.iter().map(|sample| sample.us));
        let bandwidths = self.samples.iter().map(|sample| sample.bus_gbs);
        let quarter = self.samples.len() / 4;
        let has_trend = self.records >= MIN_RECORDS;
        RankTrend {
            rank,
            records: self.records,
            median_us: us(&self.samples).unwrap_or(0.0),
            first_us: us(&self.samples[..quarter]).filter(|_| has_trend),
            last_us: us(&self.samples[self.samples.len() - quarter..]).filter(|_| has_trend),
            bus_gbs: median(bandwidths.filter(|&gbs| gbs >= 0.0 && gbs.is_finite())),
        }
    }
}

/// The first and the last quarter of a rank's records are compared only if the rank has at least this many.
const MIN_RECORDS: u64 = 16;

/// The median; of an even number of values the upper of the two in the middle. `None` without a value.
fn median(values: impl Iterator<Item = f32>) -> Option<f64> {
    let mut values: Vec<f32> = values.collect();
    values.sort_unstable_by(f32::total_cmp);
    values.get(values.len() / 2).copied().map(f64::from)
}

/// The trends in logs of NCCL's Inspector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trends {
    /// [`Trends::SCHEMA`].
    pub schema: String,
    /// The number of files with records.
    pub files: u64,
    /// The number of records, including those that were left out.
    pub records: u64,
    /// The number of lines that could not be used: torn, too long, without a header before them, or with invalid
    /// values.
    pub unread_lines: u64,
    /// The number of records that were left out, because the logs have more than [`MAX_SERIES`](super::MAX_SERIES)
    /// combinations of kind of operation and rank.
    pub left_out_records: u64,
    /// The trends, the operation with the most time first.
    pub trends: Vec<Trend>,
}

impl Trends {
    /// The name and version of the JSON form.
    pub const SCHEMA: &str = "rcomm.trends/1";
}

/// The trend of the calls of one function with one message size on one communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trend {
    /// NCCL's number of the communicator, as logged.
    pub communicator: String,
    /// The communicator's name; empty if it was not logged.
    pub name: String,
    /// The number of ranks of the communicator.
    pub size: u32,
    /// NCCL's function, such as `AllReduce`.
    pub function: String,
    /// The size of the message, bytes.
    pub bytes: u64,
    /// The number of records of all ranks.
    pub records: u64,
    /// The median of the ranks' medians, µs.
    pub median_us: f64,
    /// The median change of the ranks' times from the first quarter of their records to the last, as a share: 0.5 if
    /// the times grew by half. `None` if each rank has fewer than 16 records or a first quarter with a median of 0.
    pub change: Option<f64>,
    /// The median of the ranks' bus bandwidths, GB/s; `None` if none was logged.
    pub bus_gbs: Option<f64>,
    /// Each rank, in order of its number in the communicator.
    pub ranks: Vec<RankTrend>,
}

/// The trend of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankTrend {
    /// The rank in the communicator.
    pub rank: u32,
    /// The number of records.
    pub records: u64,
    /// The median time, µs.
    pub median_us: f64,
    /// The median of the first quarter, µs; `None` with fewer than 16 records.
    pub first_us: Option<f64>,
    /// The median of the last quarter, µs; `None` with fewer than 16 records.
    pub last_us: Option<f64>,
    /// The median bus bandwidth, GB/s; `None` if it was not logged.
    pub bus_gbs: Option<f64>,
}

/// The trends of these series, of which each has a kind of operation and a rank; the kind with the most time first.
pub(super) fn trends_of(series: HashMap<(OperationKind, u32), Series>) -> Vec<Trend> {
    let mut by_operation: BTreeMap<OperationKind, Vec<RankTrend>> = BTreeMap::new();
    for ((operation, rank), series) in series {
        let ranks = by_operation.entry(operation).or_default();
        ranks.push(series.trend(rank));
    }
    let trends = by_operation.into_iter();
    let mut trends: Vec<Trend> = trends
        .map(|(operation, ranks)| trend(operation, ranks))
        .collect();
    let time = |trend: &Trend| trend.median_us * trend.records as f64;
    trends.sort_by(|a, b| time(b).total_cmp(&time(a)));
    trends
}

fn trend(operation: OperationKind, mut ranks: Vec<RankTrend>) -> Trend {
    ranks.sort_unstable_by_key(|rank| rank.rank);
    let change = |rank: &RankTrend| {
        let (first, last) = (rank.first_us?, rank.last_us?);
        (first > 0.0).then(|| (last / first - 1.0) as f32)
    };
    Trend {
        communicator: operation.communicator,
        name: operation.name,
        size: operation.ranks,
        function: operation.function,
        bytes: operation.bytes,
        records: ranks.iter().map(|rank| rank.records).sum(),
        median_us: median(ranks.iter().map(|rank| rank.median_us as f32)).unwrap_or(0.0),
        change: median(ranks.iter().filter_map(change)),
        bus_gbs: median(ranks.iter().filter_map(|rank| Some(rank.bus_gbs? as f32))),
        ranks,
    }
}

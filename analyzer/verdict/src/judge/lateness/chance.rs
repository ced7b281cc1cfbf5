//! Whether the same one is last too often for chance.
//!
//! The record is cut into stretches. Of those that lost most, the test asks how often one and the same
//! cost most: if all are alike, each is as likely as any other, so that the number follows the binomial
//! distribution. Where there are few stretches, it counts as well how alike the losses are: what a loaded
//! host does to its ranks differs widely in length. The result is corrected for the number of ranks.

use std::collections::BTreeMap;

/// A stretch of the record is no shorter, ns, where hosts are compared: what a scheduler does to a rank
/// lasts as long.
const HOST_STRETCH_NS: i64 = 100_000_000;
/// And where devices are: none takes turns with others.
const DEVICE_STRETCH_NS: i64 = 20_000_000;
/// Nor are there more of them.
const STRETCHES: i64 = 256;
/// So often at most a job without a late rank has one that passes the test.
pub(crate) const ERROR_RATE: f64 = 1e-4;
/// As for a rank that was late in the look before.
const STILL: f64 = 1e-2;
/// This share of what was lost decides.
const DECIDES: f64 = 0.8;
/// The late bear at least this share of the stretches that decide,
const MOST: f64 = 0.6;
/// or this, where they were late in the look before.
const STILL_MOST: f64 = 0.4;
/// The least of the late costs so many times what the first of the others does.
const STANDS_OUT: f64 = 2.0;
/// Losses nearer to each other than this, as a logarithm, count as equal.
const EQUAL: f64 = 0.02;
/// Fewer stretches show no turns.
const LEAST_TURNS: usize = 6;
/// Up to so many stretches their likeness counts.
const FEW: usize = 8;

/// What one instance lost to the last to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    /// When, common time, ns.
    pub(crate) at_ns: i64,
    /// Who came last: a rank's first record, or a host.
    pub(crate) unit: usize,
    pub(crate) ms: f32,
    /// Both measured by devices; else by hosts.
    pub(crate) by_device: bool,
    /// For how long the device had still been busy when the host issued this, ms, and how far that may
    /// be off; not asked where durations are recorded.
    pub(crate) busy_ms: Option<[f32; 2]>,
}

/// One that is late again and again.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Late {
    pub(crate) unit: usize,
    /// In so many of the stretches that decide it cost most.
    pub(crate) won: usize,
}

/// What the losses of a job show.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Stretches that decide.
    pub(crate) stretches: usize,
    /// How long one is, ms.
    pub(crate) stretch_ms: f64,
    /// What each unit cost in the stretches in which no other cost more, ms: summed over all units, what
    /// the job lost.
    price_ms: BTreeMap<usize, f64>,
    /// Of each unit, the losses of the stretches that decide and that it bears.
    won: BTreeMap<usize, Vec<f64>>,
}

impl Tally {
    pub(crate) fn new(losses: &[Loss], span_ms: f64) -> Self {
        let Some(start) = losses.iter().map(|loss| loss.at_ns).min() else {
            return Self::default();
        };
        let shortest = if losses.iter().all(|loss| loss.by_device) {
            DEVICE_STRETCH_NS
        } else {
            HOST_STRETCH_NS
        };
        let length = shortest.max((span_ms * 1e6) as i64 / STRETCHES);
        let mut sums: BTreeMap<(i64, usize), f64> = BTreeMap::new();
        for loss in losses {
            let stretch = loss.at_ns.saturating_sub(start) / length;
            *sums.entry((stretch, loss.unit)).or_default() += f64::from(loss.ms);
        }
        let mut worst: BTreeMap<i64, (usize, f64)> = BTreeMap::new();
        for ((stretch, unit), ms) in sums {
            let held = worst.entry(stretch).or_insert((unit, ms));
            if ms > held.1 {
                *held = (unit, ms);
            }
        }
        let mut tally = Self {
            stretch_ms: length as f64 / 1e6,
            ..Self::default()
        };
        for &(unit, ms) in worst.values() {
            *tally.price_ms.entry(unit).or_default() += ms;
        }
        // No matter how much was lost: more than all of the time cannot be.
        let total: f64 = tally.price_ms.values().sum();
        if total > span_ms && total > 0.0 {
            let part = span_ms / total;
            tally.price_ms.values_mut().for_each(|ms| *ms *= part);
        }
        tally.decide(worst.into_values().collect());
        tally
    }

    /// The stretches that lost most decide; what is beyond three quarters of them in size counts no more
    /// than these, so that one long halt does not stand for the whole record.
    fn decide(&mut self, mut worst: Vec<(usize, f64)>) {
        worst.sort_by(|a, b| b.1.total_cmp(&a.1));
        let cap = worst.get(worst.len() / 4).map_or(0.0, |&(_, ms)| ms);
        let all: f64 = worst.iter().map(|&(_, ms)| ms.min(cap)).sum();
        let mut seen = 0.0;
        for (unit, ms) in worst {
            if seen >= all * DECIDES {
                break;
            }
            seen += ms.min(cap);
            self.stretches += 1;
            self.won.entry(unit).or_default().push(ms);
        }
    }

    /// What a unit cost, ms.
    pub(crate) fn price(&self, unit: usize) -> f64 {
        self.price_ms.get(&unit).copied().unwrap_or(0.0)
    }

    /// What all units cost together, ms.
    pub(crate) fn total_ms(&self) -> f64 {
        self.price_ms.values().sum()
    }

    /// How many bear the stretches that decide.
    pub(crate) fn bearers(&self) -> usize {
        self.won.len()
    }

    /// Whether what was lost is spread over several: each bears a part of the stretches that decide, and
    /// none more than half.
    pub(crate) fn goes_round(&self) -> bool {
        let most = self.won.values().map(Vec::len).max().unwrap_or(0);
        self.stretches >= LEAST_TURNS && most * 2 <= self.stretches
    }

    /// Those that are late too often for chance, among so many; `before` were so in the look before.
    pub(crate) fn late(&self, among: usize, least_ms: f64, before: &[usize]) -> Vec<Late> {
        let mut late: Vec<Late> = Vec::new();
        let (mut of_the_late, mut known) = (0, false);
        for (&unit, sizes) in &self.won {
            let was = before.contains(&unit);
            let (rate, least_ms) = if was {
                (STILL, least_ms / 2.0)
            } else {
                (ERROR_RATE, least_ms)
            };
            if self.price(unit) >= least_ms && self.by_chance(sizes, among) <= rate {
                of_the_late += sizes.len();
                known |= was;
                late.push(Late {
                    unit,
                    won: sizes.len(),
                });
            }
        }
        let most = if known { STILL_MOST } else { MOST };
        let is_late = |unit: &usize| late.iter().any(|one| one.unit == *unit);
        let least = late.iter().map(|one| self.price(one.unit));
        let least = least.fold(f64::MAX, f64::min);
        let others = self.price_ms.iter().filter(|(unit, _)| !is_late(unit));
        let first_other = others.map(|(_, &ms)| ms).fold(0.0, f64::max);
        let few = late.len() <= (among / 4).max(1);
        let stand_out = least >= first_other * STANDS_OUT;
        let bear_it = of_the_late as f64 >= most * self.stretches as f64;
        if few && stand_out && bear_it {
            late
        } else {
            Vec::new()
        }
    }

    /// How probable it is that, among so many that are alike, one bears so many of the stretches, of
    /// losses as equal as these.
    fn by_chance(&self, sizes: &[f64], among: usize) -> f64 {
        let among = among.max(1) as f64;
        let often = among * at_least(sizes.len(), self.stretches, 1.0 / among);
        let alike = if (2..=FEW).contains(&sizes.len()) {
            let least = sizes.iter().copied().fold(f64::MAX, f64::min);
            let most = sizes.iter().copied().fold(0.0, f64::max);
            let range = (most / least).ln().max(EQUAL);
            // So many numbers, drawn alike from one stretch of unit length, lie within `range`.
            (sizes.len() as f64 * range.powi(sizes.len() as i32 - 1)).min(1.0)
        } else {
            1.0
        };
        (often * alike).min(1.0)
    }
}

/// The probability of at least `k` of `n`, each of probability `p`.
fn at_least(k: usize, n: usize, p: f64) -> f64 {
    if p >= 1.0 || k == 0 {
        return 1.0;
    }
    let (ln_p, ln_q) = (p.ln(), (-p).ln_1p());
    let mut ln_choose = 0.0;
    let mut sum = 0.0;
    for i in 0..=n {
        if i > 0 {
            ln_choose += ((n - i + 1) as f64).ln() - (i as f64).ln();
        }
        if i >= k {
            sum += (ln_choose + i as f64 * ln_p + (n - i) as f64 * ln_q).exp();
        }
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss in each of so many stretches, of the unit and size that a function gives.
    fn losses(n: usize, of: impl Fn(usize) -> (usize, f32)) -> Vec<Loss> {
        let loss = |at: usize| {
            let (unit, ms) = of(at);
            Loss {
                at_ns: at as i64 * HOST_STRETCH_NS,
                unit,
                ms,
                by_device: false,
                busy_ms: None,
            }
        };
        (0..n).map(loss).collect()
    }

    fn late(losses: &[Loss], among: usize) -> Vec<usize> {
        let tally = Tally::new(losses, losses.len() as f64 * 100.0);
        let late = tally.late(among, 1.0, &[]);
        late.iter().map(|one| one.unit).collect()
    }

    #[test]
    fn the_binomial_tail_is_that_of_tables() {
        assert!((at_least(8, 8, 0.25) - 0.25f64.powi(8)).abs() < 1e-12);
        assert!((at_least(1, 4, 0.5) - 15.0 / 16.0).abs() < 1e-12);
        assert!((at_least(15, 20, 0.5) - 0.020_695).abs() < 1e-6);
        assert_eq!(at_least(0, 5, 0.3), 1.0);
    }

    #[test]
    fn who_is_always_last_is_late_and_who_is_last_by_turns_is_not() {
        assert_eq!(late(&losses(20, |_| (3, 20.0)), 4), [3]);
        assert!(late(&losses(20, |at| (at % 4, 20.0)), 4).is_empty());
    }

    #[test]
    fn few_stretches_prove_nothing_unless_their_losses_are_equal() {
        let uneven = [9.0, 31.0, 70.0];
        assert!(late(&losses(3, |at| (0, uneven[at])), 8).is_empty());
        assert_eq!(late(&losses(3, |_| (0, 31.0)), 8), [0]);
        assert!(late(&losses(1, |_| (0, 31.0)), 8).is_empty());
    }

    #[test]
    fn no_one_is_late_where_another_costs_as_much() {
        let two = losses(40, |at| (usize::from(at % 5 == 0 || at % 2 == 0), 20.0));
        assert!(late(&two, 4).is_empty(), "two of four");
    }

    #[test]
    fn prices_add_up_to_what_the_job_lost_and_never_to_more_than_its_time() {
        let tally = Tally::new(&losses(10, |at| (at % 3, 20.0)), 1000.0);
        assert!((tally.total_ms() - 200.0).abs() < 1e-6);
        let tally = Tally::new(&losses(10, |at| (at % 3, 500.0)), 1000.0);
        assert!((tally.total_ms() - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn who_was_late_stays_so_while_it_is_the_most_frequent_by_far() {
        let fewer = losses(20, |at| {
            if at % 2 == 0 {
                (3, 20.0)
            } else {
                (at % 20, 9.0)
            }
        });
        let tally = Tally::new(&fewer, 2000.0);
        let bar = tally.price_ms[&3] * 1.5;
        assert!(tally.late(16, bar, &[]).is_empty());
        assert_eq!(tally.late(16, bar, &[3]).len(), 1);
    }
}

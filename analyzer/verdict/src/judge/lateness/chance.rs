//! Decides whether one rank or host is last too often for chance.
//!
//! The time of the job is cut into stretches. The test takes the stretches that lost most and counts in how many of
//! them each rank (or host) cost most. If all are alike, each is equally likely to do so, and the count follows the
//! binomial distribution. With few stretches, the test also uses how equal the delays are: those that a loaded host
//! causes differ widely in length. The delay of a stretch is its largest loss, since one delay may cost in several
//! groups. The result is corrected for the number of ranks.
//!
//! The stretches are not always independent: in a program that does not wait for each operation, a rank that is behind
//! the others by chance stays behind for a while. A rank that is last in fewer and longer runs than chance makes counts
//! as if there were only as many stretches as the runs suggest.

use std::collections::BTreeMap;

/// The shortest stretch, ns, if waits are measured by hosts: a scheduler can delay a rank for this long.
const HOST_STRETCH_NS: i64 = 100_000_000;
/// The shortest stretch, ns, if waits are measured by devices, which a scheduler does not interrupt.
const DEVICE_STRETCH_NS: i64 = 20_000_000;
/// The largest number of stretches.
const STRETCHES: i64 = 256;
/// The test accuses a rank in at most this share of the jobs that have no late rank.
pub(crate) const ERROR_RATE: f64 = 1e-4;
/// The share instead of [`ERROR_RATE`] for a rank that was late in the previous snapshot: it may be accused sooner.
const REPEATED_RATE: f64 = 1e-2;
/// The stretches that lost most, and together hold this share of the loss, decide.
const DECIDES: f64 = 0.8;
/// Late ranks cost most in at least this share of the deciding stretches.
const LATE_SHARE: f64 = 0.6;
/// The share instead of [`LATE_SHARE`] if one of the late ranks was late in the previous snapshot.
const REPEATED_SHARE: f64 = 0.4;
/// The cheapest of the late ranks costs at least this many times what the most expensive of the others costs.
const STANDS_OUT: f64 = 2.0;
/// Delays whose ratio has a smaller logarithm than this count as equal.
const EQUAL_LOG_RATIO: f64 = 0.02;
/// With fewer deciding stretches, ranks are not said to take turns.
const LEAST_TURNS: usize = 6;
/// Up to this many stretches, the test uses how equal their delays are.
const FEW: usize = 8;

/// The time that one instance lost because of its last member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    /// When the last member issued its operation, common time, ns.
    pub(crate) at_ns: i64,
    /// The last to arrive: the index of the rank's first record, or of the host.
    pub(crate) unit: usize,
    /// The time lost, ms.
    pub(crate) ms: f32,
    /// Whether devices measured the waits; else hosts did.
    pub(crate) by_device: bool,
    /// How long the device was still busy when the host issued this operation, and the error of that, ms. `None` if
    /// durations are recorded or the busy time is unknown.
    pub(crate) busy_ms: Option<[f32; 2]>,
}

/// A rank or host that is repeatedly late.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Late {
    pub(crate) unit: usize,
    /// The number of deciding stretches in which the rank or host cost most.
    pub(crate) stretches: usize,
}

/// The losses of a job, summed by stretch and by unit: by rank, or by host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// The number of deciding stretches.
    pub(crate) stretches: usize,
    /// The length of a stretch, ms.
    pub(crate) stretch_ms: f64,
    /// For each unit, the sum of its losses in the stretches in which no other cost more, ms.
    cost_ms: BTreeMap<usize, f64>,
    /// For each unit, the job's loss because of it, ms: of the losses in `cost_ms`, each delay once.
    price_ms: BTreeMap<usize, f64>,
    /// For each unit, what the dearest of the delays in `price_ms` cost, ms.
    dearest_ms: BTreeMap<usize, f64>,
    /// For each unit, its largest loss in each deciding stretch in which no other unit cost more, ms.
    delays_ms: BTreeMap<usize, Vec<f64>>,
    /// For each deciding stretch, in order of time: the unit that cost most.
    worst_units: Vec<usize>,
}

/// What a unit cost in a stretch.
#[derive(Clone, Copy, Debug)]
struct Cost {
    stretch: i64,
    unit: usize,
    /// The sum of the unit's losses, ms.
    ms: f64,
    /// The largest of these losses, ms.
    delay_ms: f64,
}

impl Tally {
    /// Sums the losses of a job; `span_ms` is the job's time, ms.
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
        let mut costs: BTreeMap<(i64, usize), Cost> = BTreeMap::new();
        for loss in losses {
            let stretch = loss.at_ns.saturating_sub(start) / length;
            let cost = costs.entry((stretch, loss.unit)).or_insert(Cost {
                stretch,
                unit: loss.unit,
                ms: 0.0,
                delay_ms: 0.0,
            });
            cost.ms += f64::from(loss.ms);
            cost.delay_ms = cost.delay_ms.max(f64::from(loss.ms));
        }
        let mut worst: BTreeMap<i64, Cost> = BTreeMap::new();
        for ((stretch, _), cost) in costs {
            let held = worst.entry(stretch).or_insert(cost);
            if cost.ms > held.ms {
                *held = cost;
            }
        }
        let mut tally = Self {
            stretch_ms: length as f64 / 1e6,
            ..Self::default()
        };
        for cost in worst.values() {
            *tally.cost_ms.entry(cost.unit).or_default() += cost.ms;
        }
        let counts = |loss: &&Loss| {
            let stretch = loss.at_ns.saturating_sub(start) / length;
            worst
                .get(&stretch)
                .is_some_and(|cost| cost.unit == loss.unit)
        };
        for (unit, delay_ms) in delays(losses.iter().filter(counts).copied().collect()) {
            *tally.price_ms.entry(unit).or_default() += delay_ms;
            let dearest = tally.dearest_ms.entry(unit).or_default();
            *dearest = dearest.max(delay_ms);
        }
        // A job cannot lose more than all of its time.
        let total: f64 = tally.price_ms.values().sum();
        if total > span_ms {
            let part = span_ms / total;
            let prices = tally.price_ms.values_mut();
            prices
                .chain(tally.dearest_ms.values_mut())
                .for_each(|ms| *ms *= part);
        }
        tally.decide(worst.into_values().collect());
        tally
    }

    /// Selects the deciding stretches: those that lost most, until they hold the share [`DECIDES`] of the loss. Losses
    /// above the upper quartile count as much as the quartile, or one long halt would decide alone.
    fn decide(&mut self, mut worst: Vec<Cost>) {
        worst.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        let cap = worst.get(worst.len() / 4).map_or(0.0, |cost| cost.ms);
        let total_ms: f64 = worst.iter().map(|cost| cost.ms.min(cap)).sum();
        let mut counted_ms = 0.0;
        let mut deciding: Vec<(i64, usize)> = Vec::new();
        for cost in worst {
            if counted_ms >= total_ms * DECIDES {
                break;
            }
            counted_ms += cost.ms.min(cap);
            self.stretches += 1;
            deciding.push((cost.stretch, cost.unit));
            let delays = self.delays_ms.entry(cost.unit).or_default();
            delays.push(cost.delay_ms);
        }
        deciding.sort_unstable();
        self.worst_units = deciding.into_iter().map(|(_, unit)| unit).collect();
    }

    /// The share of the deciding stretches that count as independent for a unit, 0..1. It is the number of runs of
    /// stretches in which the unit cost most or did not, divided by the number of runs that chance makes of as many of
    /// both.
    fn independent_share(&self, unit: usize) -> f64 {
        let is_worst: Vec<bool> = (self.worst_units.iter())
            .map(|&worst| worst == unit)
            .collect();
        let all = is_worst.len() as f64;
        let worst = is_worst.iter().filter(|&&is_worst| is_worst).count() as f64;
        let changes = is_worst.windows(2).filter(|pair| pair[0] != pair[1]);
        let runs = 1.0 + changes.count() as f64;
        let by_chance = 1.0 + 2.0 * worst * (all - worst) / all.max(1.0);
        (runs / by_chance).min(1.0)
    }

    /// The sum of a unit's losses in the stretches in which no other unit cost more, ms: one delay counts in each group
    /// in which it cost something.
    pub(crate) fn cost(&self, unit: usize) -> f64 {
        self.cost_ms.get(&unit).copied().unwrap_or(0.0)
    }

    /// What the job lost because of a unit, ms.
    pub(crate) fn price(&self, unit: usize) -> f64 {
        self.price_ms.get(&unit).copied().unwrap_or(0.0)
    }

    /// What the job lost because of the dearest delay of a unit, ms.
    pub(crate) fn dearest(&self, unit: usize) -> f64 {
        self.dearest_ms.get(&unit).copied().unwrap_or(0.0)
    }

    /// What the job lost because of all units together, ms: its time at most.
    pub(crate) fn total_ms(&self) -> f64 {
        self.price_ms.values().sum()
    }

    /// The number of units that cost most in at least one deciding stretch.
    pub(crate) fn units_at_worst(&self) -> usize {
        self.delays_ms.len()
    }

    /// Whether units take turns at being late: no unit cost most in more than half of the deciding stretches, of which
    /// there are at least [`LEAST_TURNS`], and none caused more than half of the job's loss. One long delay is no turn.
    pub(crate) fn is_by_turns(&self) -> bool {
        let most = self.delays_ms.values().map(Vec::len).max().unwrap_or(0);
        let dearest_ms = self.price_ms.values().copied().fold(0.0, f64::max);
        let is_shared = dearest_ms * 2.0 <= self.total_ms();
        self.stretches >= LEAST_TURNS && most * 2 <= self.stretches && is_shared
    }

    /// The units that are late too often for chance. `compared` is the number of units compared, `least_ms` the lowest
    /// price that is reported, `before` the units that were late in the previous snapshot, for which half of `least_ms`
    /// suffices. The dearest delay of a unit does not count for that price: one long halt is not repeated. Empty if the
    /// late units are more than a quarter of all (and more than one), do not clearly cost more than all others, or did
    /// not cost most in enough of the deciding stretches.
    pub(crate) fn late(&self, compared: usize, least_ms: f64, before: &[usize]) -> Vec<Late> {
        let mut late: Vec<Late> = Vec::new();
        let (mut late_stretches, mut repeated) = (0, false);
        for (&unit, delays) in &self.delays_ms {
            let was_late = before.contains(&unit);
            let (rate, least_ms) = if was_late {
                (REPEATED_RATE, least_ms / 2.0)
            } else {
                (ERROR_RATE, least_ms)
            };
            let repeated_ms = self.price(unit) - self.dearest(unit);
            if repeated_ms >= least_ms && self.by_chance(unit, delays, compared) <= rate {
                late_stretches += delays.len();
                repeated |= was_late;
                late.push(Late {
                    unit,
                    stretches: delays.len(),
                });
            }
        }
        let share = if repeated { REPEATED_SHARE } else { LATE_SHARE };
        let is_late = |unit: &usize| late.iter().any(|late| late.unit == *unit);
        let least = late.iter().map(|late| self.price(late.unit));
        let least = least.fold(f64::MAX, f64::min);
        let others = self.price_ms.iter().filter(|(unit, _)| !is_late(unit));
        let most_of_others = others.map(|(_, &ms)| ms).fold(0.0, f64::max);
        let few = late.len() <= (compared / 4).max(1);
        let stand_out = least >= most_of_others * STANDS_OUT;
        let often_worst = late_stretches as f64 >= share * self.stretches as f64;
        if few && stand_out && often_worst {
            late
        } else {
            Vec::new()
        }
    }

    /// The probability, 0..1, that one of `compared` equal units costs most in this many stretches, with delays as
    /// equal as these. `delays` are those of `unit`, one for each such stretch.
    fn by_chance(&self, unit: usize, delays: &[f64], compared: usize) -> f64 {
        let compared = compared.max(1) as f64;
        let share = self.independent_share(unit);
        let independent = |stretches: usize| (stretches as f64 * share).round() as usize;
        let often = at_least(
            independent(delays.len()),
            independent(self.stretches),
            1.0 / compared,
        );
        let often = compared * often;
        let alike = if (2..=FEW).contains(&delays.len()) {
            let least = delays.iter().copied().fold(f64::MAX, f64::min);
            let most = delays.iter().copied().fold(0.0, f64::max);
            let range = (most / least).ln().max(EQUAL_LOG_RATIO);
            // The probability that this many numbers, uniform in an interval of length 1, lie within `range`.
            (delays.len() as f64 * range.powi(delays.len() as i32 - 1)).min(1.0)
        } else {
            1.0
        };
        (often * alike).min(1.0)
    }
}

/// Each delay: its unit and what it cost, ms.
///
/// A unit that comes late cannot be late by as much again before that time has passed. Losses that follow the first one
/// sooner are one delay with it. The delay costs as much as its largest loss: it costs in each group in which the unit
/// comes next. Losses that devices measured are a delay each: their times are those at which hosts issued the
/// operations, and a host may issue many at once.
fn delays(mut losses: Vec<Loss>) -> Vec<(usize, f64)> {
    losses.sort_by_key(|loss| (loss.unit, loss.at_ns));
    let mut delays: Vec<(usize, f64)> = Vec::new();
    let mut rest = losses.as_slice();
    while let Some(first) = rest.first() {
        let is_same = |loss: &Loss| {
            let since_ms = loss.at_ns.saturating_sub(first.at_ns) as f64 / 1e6;
            let is_soon = since_ms == 0.0 || since_ms < f64::from(loss.ms);
            loss.unit == first.unit && is_soon && !loss.by_device
        };
        let others = rest[1..].iter().take_while(|loss| is_same(loss)).count();
        let (delay, later) = rest.split_at(1 + others);
        let ms = delay.iter().map(|loss| f64::from(loss.ms));
        delays.push((first.unit, ms.fold(0.0, f64::max)));
        rest = later;
    }
    delays
}

/// The probability that at least `k` of `n` independent events of probability `p` happen.
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

    /// One loss in each of `n` stretches; `cause` gives its unit and its size, ms.
    fn losses(n: usize, cause: impl Fn(usize) -> (usize, f32)) -> Vec<Loss> {
        let loss = |nth: usize| {
            let (unit, ms) = cause(nth);
            Loss {
                at_ns: nth as i64 * HOST_STRETCH_NS,
                unit,
                ms,
                by_device: false,
                busy_ms: None,
            }
        };
        (0..n).map(loss).collect()
    }

    /// The units that are late in a job of as many stretches as there are losses.
    fn late(losses: &[Loss], compared: usize) -> Vec<usize> {
        let tally = Tally::new(losses, losses.len() as f64 * 100.0);
        let late = tally.late(compared, 1.0, &[]);
        late.iter().map(|late| late.unit).collect()
    }

    #[test]
    fn the_binomial_tail_agrees_with_published_tables() {
        assert!((at_least(8, 8, 0.25) - 0.25f64.powi(8)).abs() < 1e-12);
        assert!((at_least(1, 4, 0.5) - 15.0 / 16.0).abs() < 1e-12);
        assert!((at_least(15, 20, 0.5) - 0.020_695).abs() < 1e-6);
        assert_eq!(at_least(0, 5, 0.3), 1.0);
    }

    #[test]
    fn a_rank_that_is_always_last_is_late_and_ranks_that_take_turns_are_not() {
        assert_eq!(late(&losses(20, |_| (3, 20.0)), 4), [3]);
        assert!(late(&losses(20, |nth| (nth % 4, 20.0)), 4).is_empty());
    }

    #[test]
    fn a_rank_that_is_behind_for_a_while_by_turns_is_not_late() {
        // How often rank 1 is last proves that it is late, unless it is last in a few long runs.
        let in_runs = |nth: usize| usize::from(!matches!(nth, 0..7 | 33..41));
        let scattered = |nth: usize| usize::from(!nth.is_multiple_of(6));
        assert!(late(&losses(86, |nth| (in_runs(nth), 60.0)), 2).is_empty());
        assert_eq!(late(&losses(86, |nth| (scattered(nth), 60.0)), 2), [1]);
        assert_eq!(late(&losses(86, |_| (1, 60.0)), 2), [1]);
    }

    #[test]
    fn few_stretches_prove_nothing_unless_their_losses_are_equal() {
        let uneven = [9.0, 31.0, 70.0];
        assert!(late(&losses(3, |nth| (0, uneven[nth])), 8).is_empty());
        assert_eq!(late(&losses(3, |_| (0, 31.0)), 8), [0]);
        assert!(late(&losses(1, |_| (0, 31.0)), 8).is_empty());
    }

    #[test]
    fn delays_stay_equal_if_some_cost_in_several_groups() {
        let mut repeated = Vec::new();
        for nth in 0..5 {
            for loss in losses(5, |_| (0, 200.0)).iter().take(1 + nth % 2) {
                repeated.push(Loss {
                    at_ns: nth as i64 * HOST_STRETCH_NS,
                    ..*loss
                });
            }
        }
        assert_eq!(late(&repeated, 4), [0]);
    }

    #[test]
    fn one_long_halt_does_not_make_small_delays_dear() {
        let with_halt = |halt_ms: f32| {
            let ms = move |nth: usize| if nth == 7 { halt_ms } else { 2.0 };
            Tally::new(&losses(40, |nth| (3, ms(nth))), 10_000.0)
        };
        // The bar is 2 % of the time. 40 delays of 2 ms cost less, whatever the halt costs.
        let late = |halt_ms: f32| with_halt(halt_ms).late(4, 200.0, &[]).len();
        assert_eq!((late(2.0), late(6000.0)), (0, 0));
        let repeated = losses(40, |nth| (3, if nth == 7 { 6000.0 } else { 20.0 }));
        assert_eq!(Tally::new(&repeated, 10_000.0).late(4, 200.0, &[]).len(), 1);
    }

    #[test]
    fn no_rank_is_late_if_another_costs_nearly_as_much() {
        let near_equal = losses(40, |nth| (usize::from(nth % 5 == 0 || nth % 2 == 0), 20.0));
        assert!(
            late(&near_equal, 4).is_empty(),
            "rank 1 is late although it costs only 1.5 times what rank 0 costs"
        );
    }

    #[test]
    fn a_delay_that_costs_in_several_groups_is_paid_for_once() {
        let mut in_groups = losses(4, |_| (0, 60.0));
        // The same delays, in a group whose operation comes later, and another rank's.
        let later = |loss: &Loss, unit, ms| Loss {
            at_ns: loss.at_ns + 20_000_000,
            unit,
            ms,
            ..*loss
        };
        let first = in_groups.clone();
        in_groups.extend(first.iter().map(|loss| later(loss, 0, 62.0)));
        in_groups.push(later(&first[0], 1, 5.0));
        let tally = Tally::new(&in_groups, 1000.0);
        assert_eq!((tally.price(0), tally.cost(0)), (4.0 * 62.0, 4.0 * 122.0));
        assert_eq!(tally.total_ms(), tally.price(0));
    }

    #[test]
    fn a_long_delay_of_one_unit_is_no_turn() {
        let turns = |longest: f32| {
            let ms = move |nth: usize| if nth == 7 { longest } else { 20.0 };
            Tally::new(&losses(60, |nth| (nth % 3, ms(nth))), 6_000.0)
        };
        assert!(turns(20.0).is_by_turns());
        assert!(!turns(20_000.0).is_by_turns());
    }

    #[test]
    fn prices_add_up_to_what_the_job_lost_and_never_to_more_than_its_time() {
        let tally = Tally::new(&losses(10, |nth| (nth % 3, 20.0)), 1000.0);
        assert!((tally.total_ms() - 200.0).abs() < 1e-6);
        let tally = Tally::new(&losses(10, |nth| (nth % 3, 500.0)), 1000.0);
        assert!((tally.total_ms() - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn a_late_rank_stays_late_while_it_is_last_far_more_often_than_others() {
        let fewer = losses(20, |nth| {
            if nth % 2 == 0 {
                (3, 20.0)
            } else {
                (nth % 20, 9.0)
            }
        });
        let tally = Tally::new(&fewer, 2000.0);
        let bar = tally.price(3) * 1.5;
        assert!(tally.late(16, bar, &[]).is_empty());
        assert_eq!(tally.late(16, bar, &[3]).len(), 1);
    }
}

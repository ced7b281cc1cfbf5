//! Decides from measurements whether an observer costs a rank more than it may.

use crate::median;

/// How much longer a large message, or a step of training, may take with an observer than without, as a share.
const LARGE: f64 = 0.01;
/// How much longer a small message may take, in ns.
const SMALL_NS: f64 = 100.0;

/// The most that an observer may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bar {
    /// A hundredth.
    Share,
    /// A hundred nanoseconds on each of this many ranks.
    Nanoseconds(u32),
}

/// On which side of the bar the cost lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Within,
    Above,
    /// The rounds differ too much.
    Unknown,
}

/// Compares rounds with an observer to the same rounds without. The side is known if the interval that holds the median
/// cost in about 19 of 20 cases lies on it as a whole.
pub(crate) fn side(bar: Bar, observed: &[f64], unobserved: &[f64]) -> Side {
    let limit = match bar {
        Bar::Share => LARGE,
        Bar::Nanoseconds(ranks) => SMALL_NS * f64::from(ranks) / median(unobserved.to_vec()),
    };
    let costs = observed
        .iter()
        .zip(unobserved)
        .map(|(observed, unobserved)| observed / unobserved - 1.0);
    match interval(costs.collect()) {
        Some((_, highest)) if highest <= limit => Side::Within,
        Some((lowest, _)) if lowest > limit => Side::Above,
        _ => Side::Unknown,
    }
}

/// The interval in which the median of what the values are samples of lies in about 19 of 20 cases; `None` if there are
/// too few values to say. It holds for every distribution: the number of samples below the true median is that of heads
/// among as many tosses of a coin, for which the normal distribution stands here.
fn interval(mut values: Vec<f64>) -> Option<(f64, f64)> {
    /// With fewer values, the lowest and the highest are no such interval.
    const FEWEST: usize = 6;
    if values.len() < FEWEST {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let count = values.len() as f64;
    let lowest = (count / 2.0 - 0.98 * count.sqrt()).floor().max(0.0) as usize;
    Some((values[lowest], values[values.len() - 1 - lowest]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twenty rounds of 1,000 ns that cost so many ns more, and between so many less and more than that.
    fn rounds(cost: f64, spread: f64) -> Vec<f64> {
        (0..20_i32)
            .map(|round| 1000.0 + cost + spread * (f64::from(round) - 9.5) / 9.5)
            .collect()
    }

    #[test]
    fn the_side_is_told_only_if_the_rounds_agree_on_it() {
        let base = rounds(0.0, 0.0);
        for (cost, spread, small, large) in [
            (0.0, 5.0, Side::Within, Side::Within),
            (50.0, 5.0, Side::Within, Side::Above),
            (120.0, 5.0, Side::Above, Side::Above),
            (95.0, 100.0, Side::Unknown, Side::Above),
            (0.0, 300.0, Side::Unknown, Side::Unknown),
        ] {
            let observed = rounds(cost, spread);
            assert_eq!(
                side(Bar::Nanoseconds(1), &observed, &base),
                small,
                "{cost} {spread}"
            );
            assert_eq!(side(Bar::Share, &observed, &base), large, "{cost} {spread}");
        }
        let few = [1000.0; 5];
        assert_eq!(side(Bar::Share, &few, &few), Side::Unknown);
    }

    #[test]
    fn the_interval_of_twenty_values_is_from_the_sixth_to_the_fifteenth() {
        let values = (1..=20).rev().map(f64::from).collect();
        assert_eq!(interval(values), Some((6.0, 15.0)));
    }
}

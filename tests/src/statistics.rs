//! Statistics of samples.

/// Sorts the values and returns the middle one, or the larger of the two in the middle; NaN if there is none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

//! The assignment of gradients to buckets. The gradients of a bucket are sent together.

use super::options::ReducerOptions;
use std::sync::Arc;

/// Bucket sizes in bytes. By default the first bucket that is sent is smaller than the others, so that
/// sending starts early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSizes {
    /// Size of the first bucket.
    pub first: usize,
    /// Size of the others.
    pub rest: usize,
}

impl Default for BucketSizes {
    fn default() -> Self {
        // 1 MiB and 25 MiB, as in PyTorch's DistributedDataParallel.
        Self {
            first: 1 << 20,
            rest: 25 << 20,
        }
    }
}

/// Puts parameters of these sizes (in bytes) into buckets, the last parameter first, since its gradient is
/// computed first. A bucket is full once it has reached its size, so its last parameter may make it larger.
/// A parameter is never divided.
///
/// Returns the parameters' positions, bucket by bucket, in the order in which buckets are sent.
pub fn assign_buckets(sizes: &[usize], limits: BucketSizes) -> Vec<Vec<usize>> {
    let order: Vec<usize> = (0..sizes.len()).rev().collect();
    assign(&order, sizes, &|_| false, limits)
}

/// Like [`assign_buckets`], but takes the parameters in the order `order`. A parameter for which `has_own_bucket`
/// returns true has a bucket of its own.
fn assign(
    order: &[usize],
    sizes: &[usize],
    has_own_bucket: &dyn Fn(usize) -> bool,
    limits: BucketSizes,
) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut current = Vec::new();
    let mut filled = 0usize;
    for &parameter in order {
        if has_own_bucket(parameter) {
            if !current.is_empty() {
                buckets.push(std::mem::take(&mut current));
                filled = 0;
            }
            buckets.push(vec![parameter]);
            continue;
        }
        current.push(parameter);
        filled = filled.saturating_add(sizes[parameter]);
        let limit = if buckets.is_empty() {
            limits.first
        } else {
            limits.rest
        };
        if filled >= limit {
            buckets.push(std::mem::take(&mut current));
            filled = 0;
        }
    }
    if !current.is_empty() {
        buckets.push(current);
    }
    buckets
}

/// Where the gradient of a parameter is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) bucket: usize,
    /// The index of the gradient's first element in the bucket.
    pub(super) start: usize,
    /// The gradient's number of elements in the bucket; 0 for a sparse parameter.
    pub(super) len: usize,
}

/// Which parameters are in which bucket.
#[derive(Debug)]
pub(super) struct BucketLayout {
    /// The parameters of each bucket, in the order in which buckets are sent.
    pub(super) buckets: Vec<Vec<usize>>,
    /// The place of each parameter.
    pub(super) places: Vec<Place>,
    /// For each bucket, its parameters: the position in the list of all parameters, and the number of elements.
    pub(super) parts: Vec<Arc<[(usize, usize)]>>,
    /// The number of elements of each bucket: 0 for that of a sparse parameter, which has no memory.
    pub(super) lens: Vec<usize>,
}

impl BucketLayout {
    /// Puts parameters of the lengths `lens`, with elements of `size` bytes, into buckets, in the order `order`. Those
    /// that `options` delays are together in one more bucket.
    pub(super) fn new<T>(
        order: &[usize],
        lens: &[usize],
        size: usize,
        is_sparse: &[bool],
        options: &ReducerOptions<T>,
    ) -> Self {
        let bytes: Vec<usize> = lens.iter().map(|len| len * size).collect();
        let mut is_delayed = vec![false; lens.len()];
        for &parameter in &options.delayed.parameters {
            is_delayed[parameter] = true;
        }
        let (late, order): (Vec<usize>, Vec<usize>) =
            order.iter().partition(|&&parameter| is_delayed[parameter]);
        let has_own_bucket = |parameter: usize| is_sparse[parameter];
        let mut buckets = assign(&order, &bytes, &has_own_bucket, options.buckets);
        if !late.is_empty() {
            let until = options.delayed.until;
            let before =
                until.and_then(|until| buckets.iter().position(|bucket| bucket.contains(&until)));
            let place = before.map_or(buckets.len(), |before| before + 1);
            buckets.insert(place, late);
        }
        let mut layout = Self {
            places: vec![Place::default(); lens.len()],
            parts: Vec::with_capacity(buckets.len()),
            lens: Vec::with_capacity(buckets.len()),
            buckets: Vec::new(),
        };
        for (bucket, parameters) in buckets.iter().enumerate() {
            let mut start = 0;
            for &parameter in parameters {
                let len = if is_sparse[parameter] {
                    0
                } else {
                    lens[parameter]
                };
                layout.places[parameter] = Place { bucket, start, len };
                start += len;
            }
            layout.lens.push(start);
            let parts = parameters
                .iter()
                .map(|&parameter| (parameter, lens[parameter]));
            layout.parts.push(parts.collect());
        }
        layout.buckets = buckets;
        layout
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::Delayed;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_parameters_go_first_and_in_the_smallest_bucket() {
        let limits = BucketSizes {
            first: 10,
            rest: 100,
        };
        let buckets = assign_buckets(&[60, 60, 500, 4, 6, 3], limits);
        assert_eq!(buckets, [vec![5, 4, 3], vec![2], vec![1, 0]]);
        assert!(assign_buckets(&[], limits).is_empty());
    }

    #[test]
    fn a_sparse_parameter_has_a_bucket_of_its_own_without_memory() {
        let options = ReducerOptions::<f32> {
            buckets: BucketSizes {
                first: 100,
                rest: 100,
            },
            ..ReducerOptions::default()
        };
        let sparse = [false, true, false, false];
        let layout = BucketLayout::new(&[0, 1, 3, 2], &[3, 1000, 2, 4], 4, &sparse, &options);
        assert_eq!(layout.buckets, [vec![0], vec![1], vec![3, 2]]);
        assert_eq!(layout.lens, [3, 0, 6]);
        let place = layout.places[2];
        assert_eq!((place.bucket, place.start, place.len), (2, 4, 2));
        assert_eq!(*layout.parts[2], [(3, 4), (2, 2)]);
    }

    #[test]
    fn delayed_parameters_are_in_one_bucket_behind_that_of_another() {
        let buckets = |parameters: &[usize], until| {
            let options = ReducerOptions::<f32> {
                buckets: BucketSizes { first: 8, rest: 8 },
                delayed: Delayed {
                    parameters: parameters.to_vec(),
                    until,
                },
                ..ReducerOptions::default()
            };
            let order = [4, 3, 2, 1, 0];
            BucketLayout::new(&order, &[1, 2, 1, 1, 9], 4, &[false; 5], &options).buckets
        };
        assert_eq!(buckets(&[], None), [vec![4], vec![3, 2], vec![1], vec![0]]);
        assert_eq!(buckets(&[1, 4], None), [vec![3, 2], vec![0], vec![4, 1]]);
        assert_eq!(buckets(&[1, 4], Some(2)), [vec![3, 2], vec![4, 1], vec![0]]);
        assert_eq!(buckets(&[0, 1, 2, 3, 4], None), [vec![4, 3, 2, 1, 0]]);
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_one_bucket(
            sizes in proptest::collection::vec(0usize..2000, 0..40),
            first in 0usize..1000,
            rest in 0usize..1000,
        ) {
            let buckets = assign_buckets(&sizes, BucketSizes { first, rest });
            let order: Vec<usize> = buckets.concat();
            let expected: Vec<usize> = (0..sizes.len()).rev().collect();
            prop_assert_eq!(order, expected);
            prop_assert!(buckets.iter().all(|bucket| !bucket.is_empty()));
        }
    }
}

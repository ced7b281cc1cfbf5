//! The assignment of gradients to buckets. The gradients of a bucket are sent together.

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
/// computed first. A bucket is full once it has reached its size, so its last parameter may exceed that.
/// A parameter is never divided.
///
/// Returns the parameters' positions, bucket by bucket, in the order in which buckets are sent.
pub fn assign_buckets(sizes: &[usize], limits: BucketSizes) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut current = Vec::new();
    let mut filled = 0usize;
    for (at, &size) in sizes.iter().enumerate().rev() {
        current.push(at);
        filled = filled.saturating_add(size);
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

#[cfg(test)]
mod tests {
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

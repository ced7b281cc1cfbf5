//! [`Reducer`]: averages gradients over the ranks of a group.

use super::bucket::{BucketSizes, assign_buckets};
use super::consistency::{Parameter, check_parameters, check_values};
use super::gradient::Gradient;
use super::hook::{AllReduceHook, Averaging, Bucket, CommHook};
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;
use std::fmt;

/// How parameters that get no gradient in a step are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnusedParameters {
    /// The step fails with an error that names up to eight of them: most often the model has a mistake.
    #[default]
    Refuse,
    /// A rank without a gradient counts as one with a gradient of zero. A parameter that no rank has used
    /// gets `None`. Costs one more small operation in each step.
    Find,
}

/// How a [`Reducer`] forms and averages buckets.
pub struct ReducerOptions<T = f32> {
    /// The sizes of buckets.
    pub buckets: BucketSizes,
    /// How parameters without a gradient are handled.
    pub unused: UnusedParameters,
    /// How buckets are averaged; `None` = [`AllReduceHook`].
    pub hook: Option<Box<dyn CommHook<T>>>,
}

impl<T> Default for ReducerOptions<T> {
    fn default() -> Self {
        Self {
            buckets: BucketSizes::default(),
            unused: UnusedParameters::default(),
            hook: None,
        }
    }
}

/// Averages the gradients of a model over the ranks of a group, while others are still computed. All
/// gradients are of one type, `T`.
///
/// One step: [`ready`](Self::ready) once for each parameter, in any order, as soon as its gradient is
/// computed; then
/// [`finish`](Self::finish). All ranks make the same steps. To accumulate gradients over several backward
/// passes, add them up first, and call `ready` and `finish` in the last pass only.
///
/// # Thread safety
/// One thread at a time may use it. Other collectives of the group would mix with the reducer's: give it a
/// separate group.
pub struct Reducer<T = f32> {
    group: ProcessGroup,
    parameters: Vec<Parameter>,
    lens: Vec<usize>,
    /// Each parameter's bucket, and the index of its first element there.
    offsets: Vec<(usize, usize)>,
    buckets: Vec<Vec<usize>>,
    unused: UnusedParameters,
    hook: Box<dyn CommHook<T>>,
    step: Step<T>,
}

/// The progress of a step.
struct Step<T> {
    /// The gradients of each bucket, until it is sent.
    filled: Vec<Vec<T>>,
    /// How many parameters each bucket still waits for.
    missing: Vec<usize>,
    is_ready: Vec<bool>,
    under_way: Vec<Averaging<T>>,
}

impl<T: Gradient> Reducer<T> {
    /// Makes a reducer for a model with these parameters. All ranks of the group call this.
    ///
    /// # Blocking
    /// Until all ranks have called, since names and shapes are compared.
    ///
    /// # Errors
    /// `Mismatch` names a rank and the first parameter that differs there; `InvalidArgument` names a
    /// parameter whose shape does not fit in memory. Otherwise the group's error.
    pub fn new(
        group: &ProcessGroup,
        parameters: Vec<Parameter>,
        options: ReducerOptions<T>,
    ) -> Result<Self> {
        check_parameters(group, &parameters)?;
        let mut lens = Vec::with_capacity(parameters.len());
        for parameter in &parameters {
            let len = parameter.len().ok_or_else(|| {
                let message = format!(
                    "parameter {} of shape {:?} does not fit in memory",
                    parameter.name, parameter.shape
                );
                Error::new(ErrorKind::InvalidArgument, message).in_group(group.desc())
            })?;
            lens.push(len);
        }
        let bytes: Vec<usize> = lens.iter().map(|len| len * size_of::<T>()).collect();
        let buckets = assign_buckets(&bytes, options.buckets);
        let mut offsets = vec![(0, 0); parameters.len()];
        for (at, bucket) in buckets.iter().enumerate() {
            let mut start = 0;
            for &parameter in bucket {
                offsets[parameter] = (at, start);
                start += lens[parameter];
            }
        }
        let mut reducer = Self {
            group: group.clone(),
            parameters,
            lens,
            offsets,
            buckets,
            unused: options.unused,
            hook: options.hook.unwrap_or_else(|| Box::new(AllReduceHook)),
            step: Step {
                filled: Vec::new(),
                missing: Vec::new(),
                is_ready: Vec::new(),
                under_way: Vec::new(),
            },
        };
        reducer.begin();
        Ok(reducer)
    }

    /// The parameters of each bucket, in the order in which buckets are sent.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.buckets
    }

    /// Copies the values of the group's rank 0 to all ranks.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths of `values` are not those of the parameters; otherwise the group's
    /// error.
    pub fn broadcast_parameters(&self, values: &mut [Vec<T>]) -> Result<()> {
        self.check_lens(values)?;
        self.group.coalesce(|block| {
            for values in values {
                block.broadcast(values.as_mut_slice(), 0);
            }
        })
    }

    /// Checks that all ranks have the same values, to the bit.
    ///
    /// # Errors
    /// `Mismatch`, on all ranks, names the first parameter that differs, and the ranks. `InvalidArgument` if
    /// the lengths of `values` are not those of the parameters. Otherwise the group's error.
    pub fn check_consistency(&self, values: &[Vec<T>]) -> Result<()> {
        self.check_lens(values)?;
        check_values(&self.group, &self.parameters, values)
    }

    /// Takes the gradient of a parameter. Sends the parameter's bucket if it is now full and all buckets
    /// before it have been sent.
    ///
    /// # Blocking
    /// Does not wait for other ranks, unless the hook does.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such parameter, if it already had its gradient in this step, or if the
    /// length is not that of its shape; in these cases nothing was sent. Otherwise the hook's error.
    pub fn ready(&mut self, parameter: usize, gradient: &[T]) -> Result<()> {
        let Some(known) = self.parameters.get(parameter) else {
            let count = self.parameters.len();
            return Err(self.refuse(format!("there is no parameter {parameter} of {count}")));
        };
        let name = &known.name;
        if self.step.is_ready[parameter] {
            return Err(self.refuse(format!("{name} already had its gradient in this step")));
        }
        let len = self.lens[parameter];
        if gradient.len() != len {
            let given = gradient.len();
            let message = format!("the gradient of {name} has {given} elements, not {len}");
            return Err(self.refuse(message));
        }
        let (bucket, start) = self.offsets[parameter];
        self.step.filled[bucket][start..start + len].copy_from_slice(gradient);
        self.note_ready(parameter);
        self.send_full_buckets()
    }

    /// Waits for the averages, and returns the averaged gradient of each parameter; `None` for a parameter
    /// that no rank has used (with [`UnusedParameters::Find`] only). Afterwards the next step may begin.
    ///
    /// # Blocking
    /// Until the averages of all buckets are computed; the time-outs of the hook's operations limit this.
    ///
    /// # Errors
    /// With [`UnusedParameters::Refuse`], `InvalidArgument` names parameters without a gradient: other ranks
    /// may then wait for this one, so it should end. `InvalidArgument` also if the hook returned a wrong
    /// number of averages. Otherwise the error of the hook or the group.
    pub fn finish(&mut self) -> Result<Vec<Option<Vec<T>>>> {
        let used: Vec<u8> = self.step.is_ready.iter().map(|&it| u8::from(it)).collect();
        let missing = self.step.is_ready.iter().enumerate();
        let missing: Vec<usize> = missing.filter(|(_, is)| !**is).map(|(at, _)| at).collect();
        if !missing.is_empty() && self.unused == UnusedParameters::Refuse {
            let names = missing.iter().map(|&at| self.parameters[at].name.as_str());
            let names: Vec<&str> = names.take(8).collect();
            let more = match missing.len() - names.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = format!(
                "no gradient was given for {}{more}: if that is intended, use UnusedParameters::Find",
                names.join(", ")
            );
            return Err(self.refuse(message));
        }
        for parameter in missing {
            self.note_ready(parameter);
        }
        self.send_full_buckets()?;
        let used_anywhere = match self.unused {
            UnusedParameters::Refuse => None,
            UnusedParameters::Find => Some(self.group.all_reduce_async(used, ReduceOp::Max)?),
        };
        let under_way = std::mem::take(&mut self.step.under_way);
        let mut gradients: Vec<Option<Vec<T>>> = vec![None; self.parameters.len()];
        for (bucket, averaging) in self.buckets.iter().zip(under_way) {
            let averages = averaging()?;
            let expected: usize = bucket.iter().map(|&parameter| self.lens[parameter]).sum();
            if averages.len() != expected {
                let given = averages.len();
                let message = format!("the hook returned {given} gradients, not {expected}");
                return Err(self.refuse(message));
            }
            for &parameter in bucket {
                let (_, start) = self.offsets[parameter];
                let part = &averages[start..start + self.lens[parameter]];
                gradients[parameter] = Some(part.to_vec());
            }
        }
        if let Some(used) = used_anywhere {
            for (gradient, used) in gradients.iter_mut().zip(used.wait()?) {
                if used == 0 {
                    *gradient = None;
                }
            }
        }
        self.begin();
        Ok(gradients)
    }

    fn begin(&mut self) {
        let sizes = self.buckets.iter().map(|bucket| {
            let lens = bucket.iter().map(|&parameter| self.lens[parameter]);
            vec![T::default(); lens.sum()]
        });
        self.step = Step {
            filled: sizes.collect(),
            missing: self.buckets.iter().map(Vec::len).collect(),
            is_ready: vec![false; self.parameters.len()],
            under_way: Vec::new(),
        };
    }

    fn note_ready(&mut self, parameter: usize) {
        self.step.is_ready[parameter] = true;
        self.step.missing[self.offsets[parameter].0] -= 1;
    }

    /// Sends the next buckets, in order, up to the first that is not full.
    fn send_full_buckets(&mut self) -> Result<()> {
        loop {
            let next = self.step.under_way.len();
            if self.step.missing.get(next) != Some(&0) {
                return Ok(());
            }
            let parameters = self.buckets[next].iter();
            let bucket = Bucket {
                index: next,
                count: self.buckets.len(),
                parameters: parameters.map(|&at| (at, self.lens[at])).collect(),
                gradients: std::mem::take(&mut self.step.filled[next]),
            };
            let averaging = self.hook.start(&self.group, bucket)?;
            self.step.under_way.push(averaging);
        }
    }

    fn check_lens(&self, values: &[Vec<T>]) -> Result<()> {
        let lens: Vec<usize> = values.iter().map(Vec::len).collect();
        if lens == self.lens {
            return Ok(());
        }
        let expected = &self.lens;
        let message = format!("values of lengths {lens:?} for parameters of lengths {expected:?}");
        Err(self.refuse(message))
    }

    fn refuse(&self, message: String) -> Error {
        Error::new(ErrorKind::InvalidArgument, message).in_group(self.group.desc())
    }
}

impl<T> fmt::Debug for Reducer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("group", &self.group.desc())
            .field("parameters", &self.parameters.len())
            .field("buckets", &self.buckets.len())
            .finish()
    }
}

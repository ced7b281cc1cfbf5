//! [`Reducer`]: averages gradients over the ranks of a group.

use super::bucket::BucketLayout;
use super::consistency::{Parameter, check_parameters, check_values};
use super::gradient::Gradient;
use super::hook::Bucket;
use super::memory::BucketMemory;
use super::options::{ReducerOptions, UnevenInputs, UnusedParameters, Wire};
use super::statistics::{Meter, StepStatistics};
use super::step::{GradientState, Narrow, Step, UnderWay};
use crate::group::process_group::ProcessGroup;
use crate::group::spare::SpareOps;
use crate::group::sparse::SparseTensor;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;
use std::fmt;

/// Averages the gradients of a model over the ranks of a group, while the backward pass still computes others. All
/// gradients are of one type, `T`.
///
/// In a step, the program gives the gradient of each parameter, in any order, as soon as it is computed, and then calls
/// [`finish_in_place`](Self::finish_in_place), [`finish_each`](Self::finish_each) or [`finish`](Self::finish). All
/// ranks make the same steps.
///
/// A gradient is a part of its bucket, from the backward pass to the average: the program computes it in the memory of
/// [`gradient_mut`](Self::gradient_mut), calls [`mark_ready`](Self::mark_ready), and reads the average with
/// [`average`](Self::average). Buckets are allocated at the start, and again if they are rebuilt after the first step
/// or by [`regroup`](Self::regroup). The operations of a step use the memory of earlier ones.
/// [`ready`](Self::ready) copies a gradient from elsewhere. Without a hook, the data sent lie in memory of the group's
/// backend ([`ProcessGroup::allocate`]), if it has such memory on the host: on the CPU, ranks of a host then work in
/// each other's buckets. In such memory each bucket takes a file descriptor, and a child that this process forks shares
/// the bucket.
///
/// To accumulate gradients over several backward passes, call [`accumulate`](Self::accumulate) in each but the last:
/// nothing is sent. In the last pass [`ready`](Self::ready) adds what it gets.
///
/// # Thread safety
/// One thread at a time may use it. Other collectives of the group would mix with the reducer's: give it a
/// separate group.
pub struct Reducer<T = f32> {
    pub(super) group: ProcessGroup,
    pub(super) parameters: Vec<Parameter>,
    /// The number of elements of each parameter.
    pub(super) lens: Vec<usize>,
    /// Whether each parameter is sparse.
    pub(super) is_sparse: Vec<bool>,
    pub(super) options: ReducerOptions<T>,
    pub(super) layout: BucketLayout,
    /// The memory of each bucket; empty while its averaging has it.
    pub(super) memory: Vec<BucketMemory<T>>,
    /// For each bucket, if it is that of a sparse parameter: this rank's gradient until it is sent, and the average
    /// after the step.
    pub(super) sparse: Vec<Option<SparseTensor<T>>>,
    /// Memory for buckets that are sent in a narrower type.
    pub(super) narrow: Narrow,
    pub(super) step: Step<T>,
    /// How many steps have ended since the start or the last `regroup`.
    pub(super) steps: u64,
    /// Whether the memory holds the averages of the last step.
    pub(super) has_averages: bool,
    /// For each parameter, whether at least one rank has used it in the last step that searched for unused ones; 1
    /// before.
    pub(super) used_anywhere: Vec<u8>,
    /// With a static graph in which parameters may be unused: for each parameter, whether this rank has used it in the
    /// first step. Empty until that step ends, and on a rank that had no input in it.
    pub(super) used_in_first_step: Vec<bool>,
    /// Memory for the all-reduce that counts the ranks with input.
    pub(super) vote_memory: Vec<u32>,
    /// Operations of earlier steps, whose memory is used again.
    pub(super) spare: SpareOps,
    pub(super) meter: Meter,
}

impl<T: Gradient> Reducer<T> {
    /// Makes a reducer for a model with these parameters. All ranks of the group call this.
    ///
    /// # Blocking
    /// Until all ranks have called it, since names, shapes and sparse parameters are compared, or the group's time-out
    /// has passed.
    ///
    /// # Errors
    /// `Mismatch` names a rank and the first difference there; `InvalidArgument` names a parameter whose shape does not
    /// fit in memory, or an option that does not fit the model or another option. Otherwise the group's error.
    pub fn new(
        group: &ProcessGroup,
        parameters: Vec<Parameter>,
        options: ReducerOptions<T>,
    ) -> Result<Self> {
        let checked = options.check(parameters.len());
        let is_sparse = checked.map_err(|error| error.in_group(group.desc()))?;
        check_parameters(group, &parameters, &is_sparse)?;
        let mut lens = Vec::with_capacity(parameters.len());
        for parameter in &parameters {
            match parameter.len() {
                Some(len) => lens.push(len),
                None => {
                    let message = format!(
                        "parameter {} of shape {:?} does not fit in memory",
                        parameter.name, parameter.shape
                    );
                    let error = Error::new(ErrorKind::InvalidArgument, message);
                    return Err(error.in_group(group.desc()));
                }
            }
        }
        let order: Vec<usize> = (0..lens.len()).rev().collect();
        let layout = BucketLayout::new(&order, &lens, size_of::<T>(), &is_sparse, &options);
        let mut reducer = Self {
            group: group.clone(),
            used_anywhere: vec![1; parameters.len()],
            narrow: Narrow::new(options.wire),
            parameters,
            lens,
            is_sparse,
            options,
            layout,
            memory: Vec::new(),
            sparse: Vec::new(),
            step: Step::default(),
            steps: 0,
            has_averages: false,
            used_in_first_step: Vec::new(),
            vote_memory: Vec::new(),
            spare: SpareOps::default(),
            meter: Meter::new(),
        };
        reducer.allocate();
        Ok(reducer)
    }

    /// Allocates the memory that the buckets lack, and resets the state for the next step.
    pub(super) fn allocate(&mut self) {
        // A bucket that is neither given to a hook nor sent in another type lies in memory of the group's backend.
        let memory_is_sent = self.options.hook.is_none() && self.options.wire == Wire::Own;
        self.memory.truncate(self.layout.buckets.len());
        self.memory
            .resize_with(self.layout.buckets.len(), BucketMemory::default);
        for (memory, &len) in self.memory.iter_mut().zip(&self.layout.lens) {
            if memory.len() != len {
                *memory = match memory_is_sent {
                    true => BucketMemory::allocated(&self.group, len),
                    false => BucketMemory::vec(len),
                };
            }
        }
        self.sparse.clear();
        self.sparse.resize(self.layout.buckets.len(), None);
        self.narrow.allocate(&self.group, &self.layout.lens);
        self.step.reset(&self.layout);
    }

    /// The parameters of each bucket, in the order in which buckets are sent.
    pub fn buckets(&self) -> &[Vec<usize>] {
        &self.layout.buckets
    }

    /// The times of the last step that has ended.
    pub fn statistics(&self) -> &StepStatistics {
        self.meter.last()
    }

    /// Notes that the forward pass of the next step begins now: for [`statistics`](Self::statistics) only.
    pub fn begin_forward(&mut self) {
        self.meter.begin_forward();
    }

    /// Copies the values of the group's rank 0 to all ranks. All ranks of the group call this.
    ///
    /// # Blocking
    /// Until the broadcasts have ended on this rank, or the group's time-out has passed.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths of `values` are not those of the parameters; otherwise the group's
    /// error.
    pub fn broadcast_parameters(&self, values: &mut [Vec<T>]) -> Result<()> {
        self.broadcast_parameters_from(values, 0)
    }

    /// Copies the values of rank `root` of the group to all ranks. After [`join`](Self::join), the root must be a rank
    /// that had input in all steps, such as [`Joined::last`](super::Joined::last).
    ///
    /// # Blocking
    /// See [`broadcast_parameters`](Self::broadcast_parameters).
    ///
    /// # Errors
    /// Those of [`broadcast_parameters`](Self::broadcast_parameters).
    pub fn broadcast_parameters_from(&self, values: &mut [Vec<T>], root: u32) -> Result<()> {
        self.check_lens(values)?;
        self.group.coalesce(|block| {
            for values in values {
                block.broadcast(values.as_mut_slice(), root);
            }
        })
    }

    /// Checks that all ranks have the same values, to the bit. All ranks of the group call this.
    ///
    /// # Blocking
    /// Until all ranks have called it, or the group's time-out has passed.
    ///
    /// # Errors
    /// `Mismatch`, on all ranks, names the first parameter that differs, and the ranks. `InvalidArgument` if
    /// the lengths of `values` are not those of the parameters. Otherwise the group's error.
    pub fn check_consistency(&self, values: &[Vec<T>]) -> Result<()> {
        self.check_lens(values)?;
        check_values(&self.group, &self.parameters, values)
    }

    /// The memory of a parameter's gradient in its bucket, to compute the gradient there. It holds what was written or
    /// accumulated in this step so far; zeros if nothing was. [`mark_ready`](Self::mark_ready) says that the
    /// gradient is complete.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such parameter, if its gradient is ready, if it is sparse, or if the graph is
    /// static and it had no gradient in the first step.
    pub fn gradient_mut(&mut self, parameter: usize) -> Result<&mut [T]> {
        self.check_dense(parameter)?;
        self.begin_backward();
        let is_new = self.step.states[parameter] == GradientState::Absent;
        self.step.states[parameter] = GradientState::Partial;
        let part = self.part_mut(parameter);
        if is_new {
            part.fill(T::default());
        }
        Ok(part)
    }

    /// Says that the gradient in the memory of [`gradient_mut`](Self::gradient_mut) is complete. If the parameter's
    /// bucket is now full and all before it have been sent, sends it and the full ones that follow it.
    ///
    /// # Blocking
    /// Does not wait for other ranks, unless the hook does.
    ///
    /// # Errors
    /// Same as [`gradient_mut`](Self::gradient_mut), and `InvalidArgument` if the parameter has no gradient in this
    /// step. If the step has failed before, the reason why the group takes no more operations, or `InvalidArgument` if
    /// it takes them: the reducer then needs [`regroup`](Self::regroup). Otherwise the error of the hook or the group.
    pub fn mark_ready(&mut self, parameter: usize) -> Result<()> {
        self.check_dense(parameter)?;
        if self.step.states[parameter] == GradientState::Absent {
            let name = &self.parameters[parameter].name;
            return Err(self.refuse(format!(
                "{name} cannot be ready: it has no gradient in this step"
            )));
        }
        self.take_part()?;
        self.note_ready(parameter);
        self.send_full_buckets()
    }

    /// Adds to the gradient of a parameter, and sends nothing: for every backward pass but the last of a step, like
    /// `no_sync` of PyTorch's DistributedDataParallel.
    ///
    /// # Errors
    /// Those of [`gradient_mut`](Self::gradient_mut), and `InvalidArgument` if the length is not that of the
    /// parameter's shape.
    pub fn accumulate(&mut self, parameter: usize, gradient: &[T]) -> Result<()> {
        self.check_dense(parameter)?;
        let len = self.lens[parameter];
        if gradient.len() != len {
            let (name, given) = (&self.parameters[parameter].name, gradient.len());
            let message = format!("the gradient of {name} has {given} elements, not {len}");
            return Err(self.refuse(message));
        }
        self.begin_backward();
        let state = &mut self.step.states[parameter];
        let is_new = *state == GradientState::Absent;
        *state = GradientState::Partial;
        let part = self.part_mut(parameter);
        if is_new {
            part.copy_from_slice(gradient);
        } else {
            for (sum, &gradient) in part.iter_mut().zip(gradient) {
                *sum = sum.plus(gradient);
            }
        }
        Ok(())
    }

    /// Takes the gradient of a parameter, in addition to what was accumulated in this step. If the parameter's bucket
    /// is now full and all before it have been sent, sends it and the full ones that follow it.
    ///
    /// # Blocking
    /// Does not wait for other ranks, unless the hook does.
    ///
    /// # Errors
    /// Same as [`gradient_mut`](Self::gradient_mut), and `InvalidArgument` if the length is not that of the parameter's
    /// shape. If the step has failed before, the reason why the group takes no more operations, or `InvalidArgument` if
    /// it takes them: the reducer then needs [`regroup`](Self::regroup). In these cases nothing was sent. Otherwise the
    /// error of the hook or the group.
    pub fn ready(&mut self, parameter: usize, gradient: &[T]) -> Result<()> {
        self.accumulate(parameter, gradient)?;
        self.mark_ready(parameter)
    }

    /// Like [`ready`](Self::ready), for a parameter of [`ReducerOptions::sparse`]: rows of its gradient, the others
    /// being zero.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such parameter, if it is not sparse, if its gradient is ready, if the graph is
    /// static and it had no gradient in the first step, or if the shape is not the parameter's with one sparse
    /// dimension. If the step has failed before, as for [`ready`](Self::ready). Otherwise the error of the hook or the
    /// group.
    pub fn ready_sparse(&mut self, parameter: usize, gradient: SparseTensor<T>) -> Result<()> {
        self.check_open(parameter)?;
        let declared = &self.parameters[parameter];
        if !self.is_sparse[parameter] {
            let message = format!("{} is not a sparse parameter: use ready", declared.name);
            return Err(self.refuse(message));
        }
        if gradient.shape() != declared.shape || gradient.sparse_dims() != 1 {
            let message = format!(
                "the gradient of {} has shape {:?} with {} sparse dimensions, not {:?} with one",
                declared.name,
                gradient.shape(),
                gradient.sparse_dims(),
                declared.shape
            );
            return Err(self.refuse(message));
        }
        self.take_part()?;
        self.step.states[parameter] = GradientState::Partial;
        self.sparse[self.layout.places[parameter].bucket] = Some(gradient);
        self.note_ready(parameter);
        self.send_full_buckets()
    }

    /// The average of a parameter's gradient in the last step, until the next step begins; `None` if no rank has used
    /// the parameter, and for sparse parameters.
    pub fn average(&self, parameter: usize) -> Option<&[T]> {
        if !self.has_average(parameter) || self.is_sparse[parameter] {
            return None;
        }
        let place = self.layout.places[parameter];
        self.memory[place.bucket].get(place.start..place.start + place.len)
    }

    /// Like [`average`](Self::average), but the program may change the average, for example to clip it.
    pub fn average_mut(&mut self, parameter: usize) -> Option<&mut [T]> {
        if !self.has_average(parameter) || self.is_sparse[parameter] {
            return None;
        }
        let place = self.layout.places[parameter];
        self.memory[place.bucket].get_mut(place.start..place.start + place.len)
    }

    /// Like [`average`](Self::average), for a sparse parameter. The indices are in ascending order.
    pub fn sparse_average(&self, parameter: usize) -> Option<&SparseTensor<T>> {
        if !self.has_average(parameter) {
            return None;
        }
        let bucket = self.layout.places[parameter].bucket;
        self.sparse[bucket].as_ref()
    }

    fn has_average(&self, parameter: usize) -> bool {
        let used = self.used_anywhere.get(parameter);
        self.has_averages && used.is_some_and(|&used| used != 0)
    }

    /// Divides the parameters, in this order, into buckets.
    pub(super) fn lay_out(&mut self, order: &[usize]) {
        let size = size_of::<T>();
        self.layout = BucketLayout::new(order, &self.lens, size, &self.is_sparse, &self.options);
    }

    fn part_mut(&mut self, parameter: usize) -> &mut [T] {
        let place = self.layout.places[parameter];
        &mut self.memory[place.bucket][place.start..place.start + place.len]
    }

    /// Begins the backward pass of the step, unless it has begun. The memory no longer holds averages then.
    pub(super) fn begin_backward(&mut self) {
        if !self.step.backward_has_begun {
            self.step.backward_has_begun = true;
            self.has_averages = false;
            self.sparse.iter_mut().for_each(|sum| *sum = None);
            self.meter.begin_backward();
        }
    }

    /// Makes this rank take part in the step, unless it does already: starts the vote on uneven inputs, and counts as
    /// ready what this rank does not use of a static graph. Refuses a step that has failed, whose buckets may have lost
    /// their memory.
    pub(super) fn take_part(&mut self) -> Result<()> {
        if self.step.has_failed {
            let message = "this step has failed before: call regroup before the next step";
            let refused = self.group.refusal().cloned();
            return Err(refused.unwrap_or_else(|| self.refuse(message.to_owned())));
        }
        self.begin_backward();
        if self.step.takes_part {
            return Ok(());
        }
        self.step.takes_part = true;
        if self.options.uneven != UnevenInputs::No {
            let vote = self.start_vote(1);
            self.step.has_failed |= vote.is_err();
            self.step.vote = Some(vote?);
        }
        // With a static graph, no bucket waits for a parameter that this rank does not use.
        for parameter in 0..self.used_in_first_step.len() {
            if !self.used_in_first_step[parameter] {
                self.step.states[parameter] = GradientState::Absent;
                self.complete_gradient(parameter);
            }
        }
        Ok(())
    }

    /// Counts as ready a parameter that was not marked as ready. Without a gradient on this rank, its gradient is zero.
    pub(super) fn complete_gradient(&mut self, parameter: usize) {
        if self.is_sparse[parameter] {
            return self.note_ready(parameter);
        }
        if self.step.states[parameter] == GradientState::Absent {
            self.part_mut(parameter).fill(T::default());
        }
        self.note_ready(parameter);
    }

    /// Counts a parameter as ready.
    fn note_ready(&mut self, parameter: usize) {
        let state = &mut self.step.states[parameter];
        self.step.used[parameter] = u8::from(*state != GradientState::Absent);
        *state = GradientState::Ready;
        self.step.order.push(parameter);
        let bucket = self.layout.places[parameter].bucket;
        let missing = &mut self.step.missing[bucket];
        *missing -= 1;
        if *missing == 0 {
            self.meter.ready(bucket);
        }
    }

    /// Sends the next buckets, in order, up to the first that is not full.
    pub(super) fn send_full_buckets(&mut self) -> Result<()> {
        loop {
            let next = self.step.under_way.len();
            if self.step.missing.get(next) != Some(&0) {
                return Ok(());
            }
            let sent = self.send(next);
            self.step.has_failed |= sent.is_err();
            self.step.under_way.push(sent?);
        }
    }

    /// Starts to average a bucket, which has all its gradients.
    fn send(&mut self, bucket: usize) -> Result<UnderWay<T>> {
        let parts = &self.layout.parts[bucket];
        let group = &self.group;
        if let &[(parameter, _)] = &parts[..]
            && self.is_sparse[parameter]
        {
            let given = self.sparse[bucket].take();
            let gradient = match given {
                Some(gradient) => gradient,
                None => self.empty_gradient(parameter)?,
            };
            let bytes = size_of_val(gradient.values());
            self.meter.sent(1, bytes);
            let work = group.all_reduce_sparse_async(gradient, ReduceOp::Sum)?;
            return Ok(UnderWay::Sparse(work));
        }
        self.meter
            .sent(parts.len(), self.layout.lens[bucket] * size_of::<T>());
        if let Some(hook) = &mut self.options.hook {
            let bucket = Bucket {
                index: bucket,
                count: self.layout.buckets.len(),
                parameters: parts.clone(),
                gradients: std::mem::take(&mut self.memory[bucket]).into_vec(),
            };
            return hook.start(group, bucket).map(UnderWay::Hook);
        }
        let (memory, spare) = (&mut self.memory[bucket], &mut self.spare);
        if let Some(sent) = self.narrow.send(bucket, memory, group, spare) {
            return sent;
        }
        let work = std::mem::take(memory).all_reduce(group, ReduceOp::Avg, spare)?;
        Ok(UnderWay::Plain(work))
    }

    /// The gradient of a sparse parameter that this rank has not used.
    fn empty_gradient(&self, parameter: usize) -> Result<SparseTensor<T>> {
        let shape = self.parameters[parameter].shape.clone();
        SparseTensor::new(shape, 1, Vec::new(), Vec::new())
    }

    /// Refuses a parameter that must not get a gradient now.
    fn check_open(&self, parameter: usize) -> Result<()> {
        let Some(declared) = self.parameters.get(parameter) else {
            let count = self.parameters.len();
            return Err(self.refuse(format!("there is no parameter {parameter} of {count}")));
        };
        let name = &declared.name;
        if self.used_in_first_step.get(parameter) == Some(&false) {
            let message = format!(
                "{name} had no gradient in the first step, and has one now: the graph is not static"
            );
            return Err(self.refuse(message));
        }
        if self.step.states[parameter] == GradientState::Ready {
            return Err(self.refuse(format!("{name} already had its gradient in this step")));
        }
        Ok(())
    }

    /// Like `check_open`, and refuses a sparse parameter.
    fn check_dense(&self, parameter: usize) -> Result<()> {
        self.check_open(parameter)?;
        if self.is_sparse[parameter] {
            let name = &self.parameters[parameter].name;
            return Err(self.refuse(format!("{name} is a sparse parameter: use ready_sparse")));
        }
        Ok(())
    }

    fn check_lens(&self, values: &[Vec<T>]) -> Result<()> {
        let mut lens = values.iter().map(Vec::len);
        if values.len() == self.lens.len() && self.lens.iter().all(|&len| lens.next() == Some(len))
        {
            return Ok(());
        }
        let differ = values
            .iter()
            .zip(&self.lens)
            .position(|(values, &len)| values.len() != len);
        Err(self.refuse(match differ {
            Some(parameter) => format!(
                "{} has {} elements, but {} values are given for it",
                self.parameters[parameter].name,
                self.lens[parameter],
                values[parameter].len()
            ),
            None => format!(
                "there are {} parameters, but values for {}",
                self.lens.len(),
                values.len()
            ),
        }))
    }

    /// Whether buckets may be rebuilt after the first step.
    pub(super) fn may_rebuild(&self) -> bool {
        let hook = self.options.hook.as_ref();
        self.options.rebuild_buckets
            && (self.options.unused == UnusedParameters::Refuse || self.options.static_graph)
            && hook.is_none_or(|hook| hook.allows_rebuild())
    }

    pub(super) fn refuse(&self, message: String) -> Error {
        Error::new(ErrorKind::InvalidArgument, message).in_group(self.group.desc())
    }
}

impl<T> fmt::Debug for Reducer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("group", &self.group.desc())
            .field("parameters", &self.parameters.len())
            .field("buckets", &self.layout.buckets.len())
            .finish()
    }
}

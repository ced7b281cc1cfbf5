//! The end of a step: averages, unused parameters, and the buckets of later steps.

use super::gradient::Gradient;
use super::memory::BucketMemory;
use super::options::{UnevenInputs, UnusedParameters};
use super::reducer::Reducer;
use super::step::{GradientState, UnderWay};
use crate::group::collectives::vec_of;
use crate::group::spare::SpareOps;
use crate::group::work::Work;
use crate::op::error::Result;
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::ReduceOp;
use std::time::{Duration, Instant};

/// The most parameters that an error lists by name.
const MAX_NAMES: usize = 8;

impl<T: Gradient> Reducer<T> {
    /// Waits for the averages, which [`average`](Self::average) then returns. Afterwards the next step may begin. A
    /// gradient that was accumulated or written, and not marked as ready, is complete now.
    ///
    /// # Blocking
    /// Until the averages of all buckets are computed; the time-outs of the operations limit this.
    ///
    /// # Errors
    /// With [`UnusedParameters::Refuse`], `InvalidArgument` names parameters without a gradient; with a static graph,
    /// parameters that had a gradient in the first step and have none now. Other ranks may then wait for this rank, so
    /// this rank should end. `InvalidArgument` also if the hook returned a wrong number of elements for a bucket.
    /// Otherwise the error of the hook or the group. After a wrong number, or an error of the hook or the group, the
    /// reducer needs [`regroup`](Self::regroup).
    pub fn finish_in_place(&mut self) -> Result<()> {
        self.finish_each(|_, _| {})
    }

    /// Like [`finish_in_place`](Self::finish_in_place), and calls `each` with the position and the average of each
    /// dense parameter that at least one rank has used. It does so bucket by bucket, as soon as a bucket's averages are
    /// there, so that an optimizer works while later buckets are under way. With [`UnusedParameters::Find`] all are
    /// there before the first call, except in later steps of a static graph. What `each` writes is what
    /// [`average`](Self::average) then returns.
    ///
    /// # Blocking
    /// See [`finish_in_place`](Self::finish_in_place); later buckets wait for `each`.
    ///
    /// # Errors
    /// Those of [`finish_in_place`](Self::finish_in_place). `each` may have been called for some parameters then, and
    /// for others on other ranks: models that it has changed may differ.
    pub fn finish_each(&mut self, mut each: impl FnMut(usize, &mut [T])) -> Result<()> {
        self.check_used()?;
        self.take_part()?;
        self.complete(true, &mut each)
    }

    /// Like [`finish_in_place`](Self::finish_in_place), and returns a copy of each parameter's average; `None` for a
    /// parameter that no rank has used (with [`UnusedParameters::Find`] only), and for a sparse one.
    ///
    /// # Blocking
    /// See [`finish_in_place`](Self::finish_in_place).
    ///
    /// # Errors
    /// Those of [`finish_in_place`](Self::finish_in_place).
    pub fn finish(&mut self) -> Result<Vec<Option<Vec<T>>>> {
        self.finish_in_place()?;
        let parameters = 0..self.parameters.len();
        let averages = parameters.map(|parameter| self.average(parameter).map(<[T]>::to_vec));
        Ok(averages.collect())
    }

    /// Refuses a step in which a parameter that must have a gradient has none.
    pub(super) fn check_used(&self) -> Result<()> {
        let is_static = !self.used_in_first_step.is_empty();
        let all_required = self.options.unused == UnusedParameters::Refuse;
        let is_required = |parameter: usize| {
            self.used_in_first_step
                .get(parameter)
                .copied()
                .unwrap_or(all_required)
        };
        let states = self.step.states.iter().enumerate();
        let missing = states.filter(|&(parameter, state)| {
            *state == GradientState::Absent && is_required(parameter)
        });
        let missing: Vec<&str> = missing
            .map(|(parameter, _)| self.parameters[parameter].name.as_str())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing[..missing.len().min(MAX_NAMES)].join(", ");
        let more = match missing.len().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Err(self.refuse(if is_static {
            format!(
                "no gradient was given for {names}{more}, which had one in the first step: the graph is not static"
            )
        } else {
            format!(
                "no gradient was given for {names}{more}: if that is intended, use UnusedParameters::Find"
            )
        }))
    }

    /// Starts the all-reduce that counts the ranks with input, the *vote*; `own_vote` is 1 if this rank has input, else
    /// 0.
    pub(super) fn start_vote(&mut self, own_vote: u32) -> Result<Work<Vec<u32>>> {
        let mut vote = std::mem::take(&mut self.vote_memory);
        vote.clear();
        vote.push(own_vote);
        let (group, spare) = (&self.group, &mut self.spare);
        group.all_reduce_again(vote.into(), ReduceOp::Sum, spare, vec_of)
    }

    /// Waits for the vote; returns how many ranks have input.
    pub(super) fn count(&mut self, vote: Work<Vec<u32>>) -> Result<u32> {
        self.vote_memory = vote.wait_keeping(&mut self.spare)?;
        Ok(self.vote_memory.first().copied().unwrap_or(0))
    }

    /// Ends a step that has begun. `has_input` is whether this rank has computed gradients in it; `each` is that of
    /// [`finish_each`](Self::finish_each).
    pub(super) fn complete(
        &mut self,
        has_input: bool,
        each: &mut dyn FnMut(usize, &mut [T]),
    ) -> Result<()> {
        self.end_step(has_input, each)
            .inspect_err(|_| self.step.has_failed = true)
    }

    fn end_step(&mut self, has_input: bool, each: &mut dyn FnMut(usize, &mut [T])) -> Result<()> {
        self.meter.begin_finish();
        for parameter in 0..self.parameters.len() {
            if self.step.states[parameter] != GradientState::Ready {
                self.complete_gradient(parameter);
            }
        }
        self.send_full_buckets()?;
        let is_first = self.steps == 0;
        let used = std::mem::take(&mut self.step.used);
        let used_anywhere = match self.options.unused {
            UnusedParameters::Find if is_first || !self.options.static_graph => {
                if self.options.static_graph && has_input {
                    self.used_in_first_step = used.iter().map(|&used| used != 0).collect();
                }
                let (group, spare) = (&self.group, &mut self.spare);
                Some(group.all_reduce_again(used.into(), ReduceOp::Max, spare, vec_of)?)
            }
            _ => {
                self.step.used = used;
                None
            }
        };
        let wait_began = Instant::now();
        let factor = match self.step.vote.take() {
            None => 1.0,
            Some(vote) => self.factor(vote)?,
        };
        let mut under_way = std::mem::take(&mut self.step.under_way);
        for (bucket, averaging) in under_way.drain(..).enumerate() {
            let since = Instant::now();
            let elapsed = self.take_averages(bucket, averaging)?;
            self.meter.ended(bucket, since, elapsed);
            if factor != 1.0 {
                let averages = self.memory[bucket].iter_mut();
                averages.for_each(|average| *average = average.times(factor));
            }
            if let Some(sum) = self.sparse[bucket].take() {
                let part = factor / f64::from(self.group.size());
                self.sparse[bucket] = Some(sum.map(|value| value.times(part)));
            }
            if used_anywhere.is_none() {
                self.pass_averages(bucket, each);
            }
        }
        self.step.under_way = under_way;
        if let Some(used) = used_anywhere {
            let former =
                std::mem::replace(&mut self.used_anywhere, used.wait_keeping(&mut self.spare)?);
            self.step.used = former;
            for bucket in 0..self.layout.buckets.len() {
                self.pass_averages(bucket, each);
            }
        }
        if is_first && self.may_rebuild() {
            self.rebuild()?;
        }
        self.steps += 1;
        self.meter.finish(self.steps, wait_began);
        let group = &self.group.group;
        self.meter.record(group.recorder(), group.info().id);
        self.step.reset(&self.layout);
        self.has_averages = true;
        Ok(())
    }

    /// Calls `each` with the averages of a bucket's dense parameters that at least one rank has used.
    fn pass_averages(&mut self, bucket: usize, each: &mut dyn FnMut(usize, &mut [T])) {
        let memory = &mut self.memory[bucket];
        for &parameter in &self.layout.buckets[bucket] {
            if self.used_anywhere[parameter] != 0 && !self.is_sparse[parameter] {
                let place = self.layout.places[parameter];
                each(parameter, &mut memory[place.start..place.start + place.len]);
            }
        }
    }

    /// Waits for the vote. Returns the factor by which averages over all ranks are multiplied: with
    /// [`UnevenInputs::DivideByActive`] the one that makes them averages over the ranks with input, otherwise 1.
    fn factor(&mut self, vote: Work<Vec<u32>>) -> Result<f64> {
        let active = self.count(vote)?;
        let size = self.group.size();
        if self.options.uneven != UnevenInputs::DivideByActive || active == 0 || active == size {
            return Ok(1.0);
        }
        Ok(f64::from(size) / f64::from(active))
    }

    /// Waits for a bucket, and puts its averages into its memory. Returns how long it was under way, where that is
    /// known.
    fn take_averages(&mut self, bucket: usize, averaging: UnderWay<T>) -> Result<Option<Duration>> {
        fn wait_timed<R>(work: Work<R>, spare: &mut SpareOps) -> Result<(R, Option<Duration>)> {
            work.join()?;
            let elapsed = work.elapsed();
            Ok((work.wait_keeping(spare)?, elapsed))
        }
        let spare = &mut self.spare;
        match averaging {
            UnderWay::Plain(work) => {
                let (averages, elapsed) = wait_timed(work, spare)?;
                self.memory[bucket] = averages;
                Ok(elapsed)
            }
            UnderWay::F16(work) => {
                let (sums, elapsed) = wait_timed(work, spare)?;
                self.narrow.take_f16(bucket, sums, &mut self.memory[bucket]);
                Ok(elapsed)
            }
            UnderWay::Bf16(work) => {
                let (sums, elapsed) = wait_timed(work, spare)?;
                self.narrow
                    .take_bf16(bucket, sums, &mut self.memory[bucket]);
                Ok(elapsed)
            }
            UnderWay::Sparse(work) => {
                let (sum, elapsed) = wait_timed(work, spare)?;
                self.sparse[bucket] = Some(sum);
                Ok(elapsed)
            }
            UnderWay::Hook(averaging) => {
                let averages = averaging()?;
                let (given, expected) = (averages.len(), self.layout.lens[bucket]);
                if given != expected {
                    let message = format!(
                        "the hook returned {given} elements for bucket {bucket}, which has {expected}"
                    );
                    return Err(self.refuse(message));
                }
                self.memory[bucket] = BucketMemory::Vec(averages);
                Ok(None)
            }
        }
    }

    /// Rebuilds the buckets, in the order in which rank 0 of the group had its gradients.
    fn rebuild(&mut self) -> Result<()> {
        let mut order: Vec<u32> = self
            .step
            .order
            .iter()
            .map(|&parameter| parameter as u32)
            .collect();
        if order.len() < 2 || self.layout.buckets.len() < 2 {
            return Ok(());
        }
        self.group.broadcast(&mut order, 0)?;
        let order: Vec<usize> = order
            .into_iter()
            .map(|parameter| parameter as usize)
            .collect();
        if self.layout.buckets.iter().flatten().eq(&order) {
            return Ok(());
        }
        let before = std::mem::take(&mut self.memory);
        let sparse = std::mem::take(&mut self.sparse);
        let places = self.layout.places.clone();
        self.lay_out(&order);
        self.allocate();
        for (from, to) in places.iter().zip(&self.layout.places) {
            let averages = &before[from.bucket][from.start..from.start + from.len];
            self.memory[to.bucket][to.start..to.start + to.len].copy_from_slice(averages);
        }
        for (parameter, from) in places
            .iter()
            .enumerate()
            .filter(|&(parameter, _)| self.is_sparse[parameter])
        {
            self.sparse[self.layout.places[parameter].bucket] = sparse[from.bucket].clone();
        }
        Ok(())
    }
}

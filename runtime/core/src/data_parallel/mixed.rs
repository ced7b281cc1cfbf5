//! [`MixedReducer`]: a model whose parameters have several element types.

use super::bucket::BucketSizes;
use super::consistency::{Parameter, check_parameters};
use super::gradient::Gradient;
use super::join::Joined;
use super::options::{ReducerOptions, UnevenInputs, UnusedParameters, Wire};
use super::reducer::Reducer;
use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::group::sparse::SparseTensor;
use crate::op::error::{Error, ErrorKind, Result};
use half::{bf16, f16};
use rcomm_recorder::model::{DType, ReduceOp};
use std::fmt;

/// The types of gradients, in the order in which their groups and reducers are made.
const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

/// The options of a [`MixedReducer`], which mean what they mean in [`ReducerOptions`]. All ranks pass the same options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixedOptions {
    /// The sizes of buckets.
    pub buckets: BucketSizes,
    /// Whether buckets are rebuilt after the first step.
    pub rebuild_buckets: bool,
    /// How parameters without a gradient are handled.
    pub unused: UnusedParameters,
    /// Whether each rank uses the same parameters in each step.
    pub static_graph: bool,
    /// Whether some ranks may run out of input before others.
    pub uneven: UnevenInputs,
    /// The parameters, by position, whose gradients are sparse.
    pub sparse: Vec<usize>,
    /// The element type in which gradients of `f32` and `f64` are sent; those of 16 bits are sent in their own.
    pub wire: Wire,
}

impl Default for MixedOptions {
    fn default() -> Self {
        Self {
            buckets: BucketSizes::default(),
            rebuild_buckets: true,
            unused: UnusedParameters::default(),
            static_graph: false,
            uneven: UnevenInputs::default(),
            sparse: Vec::new(),
            wire: Wire::default(),
        }
    }
}

/// The reducers of a model's types; `None` for a type that no parameter has.
#[derive(Default)]
pub struct Reducers {
    pub(super) f32: Option<Reducer<f32>>,
    pub(super) f64: Option<Reducer<f64>>,
    pub(super) f16: Option<Reducer<f16>>,
    pub(super) bf16: Option<Reducer<bf16>>,
}

/// Evaluates an expression with the reducer of each type, in the same order on all ranks.
macro_rules! each {
    ($reducers:expr, $reducer:ident => $then:expr) => {{
        if let Some($reducer) = &mut $reducers.f32 {
            $then;
        }
        if let Some($reducer) = &mut $reducers.f64 {
            $then;
        }
        if let Some($reducer) = &mut $reducers.f16 {
            $then;
        }
        if let Some($reducer) = &mut $reducers.bf16 {
            $then;
        }
    }};
}

/// Evaluates `$then` with the reducer of a type that is known at run time, or `$none` if there is no such reducer.
macro_rules! with {
    ($reducers:expr, $dtype:expr, $none:expr, $reducer:ident => $then:expr) => {
        match $dtype {
            DType::F32 => $reducers.f32.as_mut().map_or($none, |$reducer| $then),
            DType::F64 => $reducers.f64.as_mut().map_or($none, |$reducer| $then),
            DType::F16 => $reducers.f16.as_mut().map_or($none, |$reducer| $then),
            DType::Bf16 => $reducers.bf16.as_mut().map_or($none, |$reducer| $then),
            _ => $none,
        }
    };
}

/// Like a [`Reducer`], for parameters of several element types: `f32`, `f64`, `f16` and `bf16`. A bucket has gradients
/// of one type, as in PyTorch's DistributedDataParallel.
///
/// Each type that occurs has a [`Reducer`] of its own ([`reducer`](Self::reducer)), in a group of its own, so that
/// buckets of different types are sent in whatever order they become full; a model of one type uses the group that was
/// given. Parameters are numbered as in the list that [`new`](Self::new) gets; a method that takes or returns gradients
/// is called with the parameter's type.
///
/// # Thread safety
/// One thread at a time may use it. Other collectives of the group would mix with the reducer's: give it a separate
/// group.
pub struct MixedReducer {
    group: ProcessGroup,
    parameters: Vec<(Parameter, DType)>,
    /// Whether each parameter is sparse.
    is_sparse: Vec<bool>,
    /// The number of each parameter in the reducer of its type.
    places: Vec<usize>,
    reducers: Reducers,
}

impl MixedReducer {
    /// Makes a reducer for a model with these parameters. All ranks of the group call this.
    ///
    /// # Blocking
    /// Until all ranks have called it, since names, shapes and types are compared, and groups are made.
    ///
    /// # Errors
    /// `Mismatch` names a rank and the first parameter that differs there; `InvalidArgument` names a parameter whose
    /// shape does not fit in memory or whose type is none of the four, or a position in `sparse` that no parameter has.
    /// Otherwise the group's error, or that of [`World::new_group`](crate::World::new_group).
    pub fn new(
        group: &ProcessGroup,
        parameters: Vec<(Parameter, DType)>,
        options: &MixedOptions,
    ) -> Result<Self> {
        let mut is_sparse = vec![false; parameters.len()];
        for &parameter in &options.sparse {
            let Some(is_sparse) = is_sparse.get_mut(parameter) else {
                let count = parameters.len();
                let message = format!(
                    "parameter {parameter} cannot be sparse: there are {count} parameters, numbered from 0"
                );
                return Err(refuse(group, message));
            };
            *is_sparse = true;
        }
        let mut made = Self {
            group: group.clone(),
            places: vec![0; parameters.len()],
            parameters,
            is_sparse,
            reducers: Reducers::default(),
        };
        made.check(group)?;
        let [f32, f64, f16, bf16] = made.groups()?;
        made.reducers = Reducers {
            f32: made.make(f32, options, options.wire)?,
            f64: made.make(f64, options, options.wire)?,
            f16: made.make(f16, options, Wire::Own)?,
            bf16: made.make(bf16, options, Wire::Own)?,
        };
        Ok(made)
    }

    /// Checks that all ranks of `group` have these parameters, of these types.
    fn check(&self, group: &ProcessGroup) -> Result<()> {
        let mut typed = Vec::with_capacity(self.parameters.len());
        for (parameter, dtype) in &self.parameters {
            if !TYPES.contains(dtype) {
                let name = &parameter.name;
                let message = format!(
                    "{name} is of type {dtype}: gradients are of type f32, f64, f16 or bf16"
                );
                return Err(refuse(group, message));
            }
            let name = format!("{} of {dtype}", parameter.name);
            typed.push(Parameter::new(name, &parameter.shape));
        }
        check_parameters(group, &typed, &self.is_sparse)
    }

    /// Whether all parameters have the same type.
    fn is_uniform(&self) -> bool {
        let mut types = self.parameters.iter().map(|(_, dtype)| dtype);
        types.next().is_none_or(|first| types.all(|it| it == first))
    }

    /// The group for the reducer of a type.
    fn group_of(&self, dtype: DType) -> Result<ProcessGroup> {
        if self.is_uniform() {
            return Ok(self.group.clone());
        }
        let options = GroupOptions::named(format!("{} {dtype}", self.group.desc()));
        self.group.new_subgroups(self.group.size(), &options)
    }

    /// The groups for the reducers of all types, by [`TYPES`]; `None` for a type that no parameter has. All are made
    /// before the first reducer compares anything: to make a group may wait for all ranks, of which some are in
    /// [`new`](Self::new) and others in [`regroup`](Self::regroup).
    fn groups(&self) -> Result<[Option<ProcessGroup>; TYPES.len()]> {
        let mut groups = [const { None }; TYPES.len()];
        for (group, dtype) in groups.iter_mut().zip(TYPES) {
            if self.parameters.iter().any(|(_, it)| *it == dtype) {
                *group = Some(self.group_of(dtype)?);
            }
        }
        Ok(groups)
    }

    /// The reducer in `group` for the parameters of type `T`; `None` if there are none.
    fn make<T: Gradient>(
        &mut self,
        group: Option<ProcessGroup>,
        options: &MixedOptions,
        wire: Wire,
    ) -> Result<Option<Reducer<T>>> {
        let Some(group) = group else {
            return Ok(None);
        };
        let (mut parameters, mut sparse) = (Vec::new(), Vec::new());
        for (number, (parameter, dtype)) in self.parameters.iter().enumerate() {
            if *dtype != T::DTYPE {
                continue;
            }
            self.places[number] = parameters.len();
            if self.is_sparse[number] {
                sparse.push(parameters.len());
            }
            parameters.push(parameter.clone());
        }
        let options = ReducerOptions {
            buckets: options.buckets,
            rebuild_buckets: options.rebuild_buckets,
            unused: options.unused,
            static_graph: options.static_graph,
            uneven: options.uneven,
            sparse,
            wire,
            ..ReducerOptions::default()
        };
        Reducer::new(&group, parameters, options).map(Some)
    }

    /// The reducer of the parameters of type `T`, with their averages, buckets and statistics; `None` if there are
    /// none. Its parameters are numbered among those of the type.
    pub fn reducer<T: Gradient>(&self) -> Option<&Reducer<T>> {
        T::of(&self.reducers)
    }

    /// Like [`reducer`](Self::reducer), but mutable, for example to set a hook ([`Reducer::set_hook`]). Only
    /// [`finish_in_place`](Self::finish_in_place) of the `MixedReducer` may end a step, since a step is one of all
    /// types.
    pub fn reducer_mut<T: Gradient>(&mut self) -> Option<&mut Reducer<T>> {
        T::of_mut(&mut self.reducers)
    }

    /// The reducer that has a parameter, which is of type `T`, and the parameter's number there.
    fn find<T: Gradient>(&mut self, parameter: usize) -> Result<(&mut Reducer<T>, usize)> {
        let dtype = self.dtype(parameter)?;
        let place = self.places[parameter];
        let reducer = T::of_mut(&mut self.reducers);
        match reducer.filter(|_| dtype == T::DTYPE) {
            Some(reducer) => Ok((reducer, place)),
            None => {
                let name = &self.parameters[parameter].0.name;
                let message = format!("{name} has gradients of {dtype}, not of {}", T::DTYPE);
                Err(refuse(&self.group, message))
            }
        }
    }

    /// The type of a parameter.
    fn dtype(&self, parameter: usize) -> Result<DType> {
        let declared = self.parameters.get(parameter);
        declared.map(|(_, dtype)| *dtype).ok_or_else(|| {
            let count = self.parameters.len();
            refuse(
                &self.group,
                format!("there is no parameter {parameter} of {count}"),
            )
        })
    }

    /// See [`Reducer::gradient_mut`].
    ///
    /// # Errors
    /// Those of [`Reducer::gradient_mut`]; `InvalidArgument` if the parameter is of another type.
    pub fn gradient_mut<T: Gradient>(&mut self, parameter: usize) -> Result<&mut [T]> {
        let (reducer, place) = self.find(parameter)?;
        reducer.gradient_mut(place)
    }

    /// See [`Reducer::mark_ready`].
    ///
    /// # Errors
    /// Those of [`Reducer::mark_ready`].
    pub fn mark_ready(&mut self, parameter: usize) -> Result<()> {
        let (dtype, place) = (self.dtype(parameter)?, self.places[parameter]);
        with!(self.reducers, dtype, Ok(()), reducer => reducer.mark_ready(place))
    }

    /// See [`Reducer::accumulate`].
    ///
    /// # Errors
    /// Those of [`Reducer::accumulate`]; `InvalidArgument` if the parameter is of another type.
    pub fn accumulate<T: Gradient>(&mut self, parameter: usize, gradient: &[T]) -> Result<()> {
        let (reducer, place) = self.find(parameter)?;
        reducer.accumulate(place, gradient)
    }

    /// See [`Reducer::ready`].
    ///
    /// # Errors
    /// Those of [`Reducer::ready`]; `InvalidArgument` if the parameter is of another type.
    pub fn ready<T: Gradient>(&mut self, parameter: usize, gradient: &[T]) -> Result<()> {
        let (reducer, place) = self.find(parameter)?;
        reducer.ready(place, gradient)
    }

    /// See [`Reducer::ready_sparse`].
    ///
    /// # Errors
    /// Those of [`Reducer::ready_sparse`]; `InvalidArgument` if the parameter is of another type.
    pub fn ready_sparse<T: Gradient>(
        &mut self,
        parameter: usize,
        gradient: SparseTensor<T>,
    ) -> Result<()> {
        let (reducer, place) = self.find(parameter)?;
        reducer.ready_sparse(place, gradient)
    }

    /// Ends the step of all types; see [`Reducer::finish_in_place`].
    ///
    /// # Blocking
    /// See [`Reducer::finish_in_place`].
    ///
    /// # Errors
    /// Those of [`Reducer::finish_in_place`], which name the parameters of one type.
    pub fn finish_in_place(&mut self) -> Result<()> {
        each!(self.reducers, reducer => reducer.check_used()?);
        let ended = self.complete();
        if ended.is_err() {
            // The step is over for all types, and so the hook of each may be replaced.
            each!(self.reducers, reducer => reducer.step.has_failed = true);
        }
        ended
    }

    /// Ends a step in which all parameters have the gradients that they must have.
    fn complete(&mut self) -> Result<()> {
        // A rank that has joined waits for the votes of all types before it takes part in any.
        each!(self.reducers, reducer => reducer.take_part()?);
        each!(self.reducers, reducer => reducer.complete(true, &mut |_, _| {})?);
        Ok(())
    }

    /// See [`Reducer::average`]; `None` also if the parameter is of another type.
    pub fn average<T: Gradient>(&self, parameter: usize) -> Option<&[T]> {
        let (_, dtype) = self.parameters.get(parameter)?;
        let reducer = self.reducer::<T>().filter(|_| *dtype == T::DTYPE)?;
        reducer.average(self.places[parameter])
    }

    /// See [`Reducer::average_mut`]; `None` also if the parameter is of another type.
    pub fn average_mut<T: Gradient>(&mut self, parameter: usize) -> Option<&mut [T]> {
        let (reducer, place) = self.find(parameter).ok()?;
        reducer.average_mut(place)
    }

    /// See [`Reducer::sparse_average`]; `None` also if the parameter is of another type.
    pub fn sparse_average<T: Gradient>(&self, parameter: usize) -> Option<&SparseTensor<T>> {
        let (_, dtype) = self.parameters.get(parameter)?;
        let reducer = self.reducer::<T>().filter(|_| *dtype == T::DTYPE)?;
        reducer.sparse_average(self.places[parameter])
    }

    /// See [`Reducer::begin_forward`].
    pub fn begin_forward(&mut self) {
        each!(self.reducers, reducer => reducer.begin_forward());
    }

    /// See [`Reducer::join`]. Without a parameter it returns at once.
    ///
    /// # Blocking
    /// See [`Reducer::join`].
    ///
    /// # Errors
    /// Those of [`Reducer::join`].
    pub fn join(&mut self) -> Result<Joined> {
        each!(self.reducers, reducer => reducer.check_join()?);
        let mut shadowed = 0;
        loop {
            let mut active = 0;
            each!(self.reducers, reducer => {
                let vote = reducer.start_vote(0)?;
                active = reducer.count(vote)?.max(active);
            });
            if active == 0 {
                break;
            }
            each!(self.reducers, reducer => reducer.shadow()?);
            shadowed += 1;
        }
        let mut last = self.group.rank();
        if !self.parameters.is_empty() {
            let mut greatest = [if shadowed == 0 { last } else { 0 }];
            self.group.all_reduce(&mut greatest, ReduceOp::Max)?;
            [last] = greatest;
        }
        Ok(Joined { shadowed, last })
    }

    /// Continues in another group, as [`Reducer::regroup`], with new groups for the types. Ranks that have joined call
    /// [`new`](Self::new) at the same time.
    ///
    /// # Blocking
    /// See [`new`](Self::new).
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and those of the hooks, if any were set.
    pub fn regroup(&mut self, group: &ProcessGroup) -> Result<()> {
        self.check(group)?;
        self.group = group.clone();
        let mut groups = self.groups()?.into_iter().flatten();
        each!(self.reducers, reducer => {
            if let Some(group) = groups.next() {
                reducer.regroup(&group)?;
            }
        });
        Ok(())
    }
}

fn refuse(group: &ProcessGroup, message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).in_group(group.desc())
}

impl fmt::Debug for MixedReducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MixedReducer")
            .field("group", &self.group.desc())
            .field("parameters", &self.parameters.len())
            .finish()
    }
}

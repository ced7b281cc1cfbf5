//! Data-parallel training of the network: each rank computes gradients on its own part of a batch, and a reducer
//! averages them.

use crate::model::{Batch, Model, PARAMETERS};
use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
use rcomm::{Buffer, ProcessGroup};
use rcomm_candle::{TensorGroup, read, tensor_of};

/// The number of points in a batch of all ranks together.
pub(crate) const BATCH: usize = 240;
/// The learning rate.
pub(crate) const RATE: f64 = 0.1;

/// The network of one rank, with the reducer of its gradients.
pub(crate) struct Trainer {
    pub(crate) model: Model,
    reducer: Reducer<f32>,
    rank: usize,
    ranks: usize,
}

impl Trainer {
    /// Makes a network, and gives it the weights of rank 0. All ranks of the group call this.
    pub(crate) fn new(group: &ProcessGroup) -> Result<Self> {
        // Each rank starts with different weights.
        let model = Model::new(u64::from(group.rank()))?;
        for parameter in &model.parameters {
            group.broadcast_tensor(parameter.as_tensor(), 0)?;
        }
        Ok(Self {
            model,
            reducer: Reducer::new(group, parameters(), ReducerOptions::default())?,
            rank: group.rank() as usize,
            ranks: group.size() as usize,
        })
    }

    /// Trains with this rank's part of the batch of a step, and returns the loss. All ranks of the group call this.
    pub(crate) fn step(&mut self, step: usize) -> Result<f32> {
        let part = Batch::of_step(step, BATCH)?.part(self.rank, self.ranks)?;
        let (loss, gradients) = self.model.backward(&part)?;
        let averages = self.average(&gradients)?;
        self.model.descend(&averages, RATE)?;
        Ok(loss)
    }

    /// Averages the gradients over all ranks. The last parameter is the first to be ready, as in backpropagation.
    fn average(&mut self, gradients: &GradStore) -> Result<Vec<Tensor>> {
        for (index, parameter) in self.model.parameters.iter().enumerate().rev() {
            let gradient = gradients.get(parameter);
            let gradient = gradient.context("a parameter has no gradient")?;
            read(gradient, |buffer| {
                let values = buffer.as_slice::<f32>().unwrap_or_default();
                self.reducer.ready(index, values)
            })?;
        }
        let averages = self.reducer.finish()?.into_iter().zip(PARAMETERS);
        let averages = averages.map(|(average, (_, shape))| {
            let shape: Vec<u64> = shape.iter().map(|&size| size as u64).collect();
            let average = Buffer::from_vec(average.unwrap_or_default());
            Ok(tensor_of(average.with_shape(&shape)?)?)
        });
        averages.collect()
    }
}

/// The names and shapes of the parameters, which the reducer compares between the ranks.
fn parameters() -> Vec<Parameter> {
    let named = PARAMETERS.iter().map(|(name, shape)| {
        let shape: Vec<u64> = shape.iter().map(|&size| size as u64).collect();
        Parameter::new(*name, &shape)
    });
    named.collect()
}

//! A network with one hidden layer, in candle.

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};

/// The number of the network's inputs.
const INPUTS: usize = 2;
/// The number of the hidden layer's outputs.
const HIDDEN: usize = 32;

/// Names and shapes of the network's parameters.
pub(crate) const PARAMETERS: [(&str, &[usize]); 4] = [
    ("hidden.weight", &[INPUTS, HIDDEN]),
    ("hidden.bias", &[HIDDEN]),
    ("output.weight", &[HIDDEN, 1]),
    ("output.bias", &[1]),
];

/// The network, with its parameters in the order of [`PARAMETERS`].
pub(crate) struct Model {
    pub(crate) parameters: Vec<Var>,
}

impl Model {
    /// Returns a network with pseudo-random weights between -1 and 1.
    pub(crate) fn new(seed: u64) -> Result<Self> {
        let mut noise = Noise(seed);
        let parameters = PARAMETERS.map(|(_, shape)| {
            let len = shape.iter().product();
            let values: Vec<f32> = (0..len).map(|_| noise.next()).collect();
            Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)
        });
        let parameters = parameters.into_iter().collect::<Result<_>>()?;
        Ok(Self { parameters })
    }

    /// Returns the mean squared error over the points of a batch, and the gradients.
    pub(crate) fn backward(&self, batch: &Batch) -> Result<(f32, GradStore)> {
        let [hidden_weight, hidden_bias, output_weight, output_bias] =
            [0, 1, 2, 3].map(|index| self.parameters[index].as_tensor());
        let hidden = batch.points.matmul(hidden_weight)?;
        let hidden = hidden.broadcast_add(hidden_bias)?.tanh()?;
        let output = hidden.matmul(output_weight)?.broadcast_add(output_bias)?;
        let loss = (output - &batch.values)?.sqr()?.mean_all()?;
        Ok((loss.to_scalar()?, loss.backward()?))
    }

    /// Takes one step of gradient descent.
    pub(crate) fn descend(&self, gradients: &[Tensor], rate: f64) -> Result<()> {
        for (parameter, gradient) in self.parameters.iter().zip(gradients) {
            parameter.set(&(parameter.as_tensor() - (gradient * rate)?)?)?;
        }
        Ok(())
    }
}

/// Points, with the values that the network should learn for them.
pub(crate) struct Batch {
    points: Tensor,
    values: Tensor,
}

impl Batch {
    /// Returns `count` points for a step, on a surface that no linear function fits.
    pub(crate) fn of_step(step: usize, count: usize) -> Result<Self> {
        let mut noise = Noise(step as u64 + 1);
        let points: Vec<[f32; INPUTS]> = (0..count).map(|_| [noise.next(), noise.next()]).collect();
        let values: Vec<f32> = points.iter().map(|[x, y]| x * y + 0.5 * x).collect();
        Ok(Self {
            points: Tensor::from_vec(points.concat(), (count, INPUTS), &Device::Cpu)?,
            values: Tensor::from_vec(values, (count, 1), &Device::Cpu)?,
        })
    }

    /// Returns one of `parts` equal parts, by its index from 0. A remainder of the points is in no part.
    pub(crate) fn part(&self, index: usize, parts: usize) -> Result<Self> {
        let count = self.points.dim(0)? / parts;
        let part = |tensor: &Tensor| tensor.narrow(0, index * count, count);
        Ok(Self {
            points: part(&self.points)?,
            values: part(&self.values)?,
        })
    }
}

/// A pseudo-random generator with the same sequence on every machine: a linear congruential generator with the
/// constants of Knuth's MMIX.
struct Noise(u64);

impl Noise {
    /// Returns the next number, between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // Takes the upper 24 bits, because the low bits of such a generator are hardly random, and an `f32` holds 24
        // bits exactly.
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

//! One layer: a square matrix and an activation function.

/// The number of a layer's inputs, and of its outputs.
pub(crate) const WIDTH: usize = 8;

/// One layer, with its accumulated gradient.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layer {
    weight: Vec<f32>,
    gradient: Vec<f32>,
}

impl Layer {
    /// Returns the layer of this number, with a weight matrix near the identity.
    pub(crate) fn new(number: u32) -> Self {
        let weight_at = |index: usize| {
            let diagonal = if index.is_multiple_of(WIDTH + 1) {
                1.0
            } else {
                0.0
            };
            diagonal + 0.1 * (index as f32 + number as f32 * 0.37).cos()
        };
        Self {
            weight: (0..WIDTH * WIDTH).map(weight_at).collect(),
            gradient: vec![0.0; WIDTH * WIDTH],
        }
    }

    /// Returns the output for `input`.
    pub(crate) fn forward(&self, input: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks(WIDTH);
        let dot = |row: &[f32]| -> f32 { row.iter().zip(input).map(|(w, x)| w * x).sum() };
        rows.map(|row| dot(row).tanh()).collect()
    }

    /// Adds to the gradient of the weights, and returns the gradient of the input; `gradient` is that of the output.
    pub(crate) fn backward(&mut self, input: &[f32], output: &[f32], gradient: &[f32]) -> Vec<f32> {
        let mut input_gradient = vec![0.0; WIDTH];
        for (row, (out, output_gradient)) in output.iter().zip(gradient).enumerate() {
            let sum_gradient = output_gradient * (1.0 - out * out);
            for (column, x) in input.iter().enumerate() {
                self.gradient[row * WIDTH + column] += sum_gradient * x;
                input_gradient[column] += sum_gradient * self.weight[row * WIDTH + column];
            }
        }
        input_gradient
    }

    /// Takes one step of gradient descent, and resets the gradient.
    pub(crate) fn descend(&mut self, rate: f32) {
        for (weight, gradient) in self.weight.iter_mut().zip(&mut self.gradient) {
            *weight -= rate * std::mem::take(gradient);
        }
    }
}

/// Returns the mean squared error, and writes its gradient with respect to `output` to `gradient`.
pub(crate) fn loss(output: &[f32], target: &[f32], gradient: &mut [f32]) -> f32 {
    let mut loss = 0.0;
    for ((out, expected), gradient) in output.iter().zip(target).zip(gradient) {
        let error = out - expected;
        loss += error * error / WIDTH as f32;
        *gradient = 2.0 * error / WIDTH as f32;
    }
    loss
}

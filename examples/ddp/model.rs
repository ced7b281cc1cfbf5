//! A network of one hidden layer, and its gradients, by hand.

/// Inputs of the network.
pub(crate) const INPUTS: usize = 2;
const HIDDEN: usize = 32;

/// Names and shapes of the parameters, in order.
pub(crate) const PARAMETERS: [(&str, &[u64]); 4] = [
    ("hidden.weight", &[HIDDEN as u64, INPUTS as u64]),
    ("hidden.bias", &[HIDDEN as u64]),
    ("output.weight", &[HIDDEN as u64]),
    ("output.bias", &[1]),
];

/// One point and the value that the network shall learn for it.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) point: [f32; INPUTS],
    pub(crate) value: f32,
}

/// Numbers that look random and are the same everywhere.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    /// Between -1 and 1.
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Small random weights.
pub(crate) fn initial(seed: u64) -> Vec<Vec<f32>> {
    let mut noise = Noise(seed);
    let lens = PARAMETERS.map(|(_, shape)| shape.iter().product::<u64>() as usize);
    lens.iter()
        .map(|&len| (0..len).map(|_| noise.next()).collect())
        .collect()
}

/// The mean of the squared errors over these samples, and its gradients.
///
/// `ready` is called with a parameter and its gradient as soon as that is there: the last first.
pub(crate) fn backward<E>(
    weights: &[Vec<f32>],
    samples: &[Sample],
    mut ready: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<f32, E> {
    let [hidden_weight, hidden_bias, output_weight, output_bias] = weights else {
        unreachable!("a model has four parameters");
    };
    let count = samples.len() as f32;
    let mut loss = 0.0;
    let mut activations = Vec::with_capacity(samples.len());
    let mut errors = Vec::with_capacity(samples.len());
    for sample in samples {
        let hidden: Vec<f32> = hidden_weight
            .chunks(INPUTS)
            .zip(hidden_bias)
            .map(|(row, bias)| {
                let sum: f32 = row.iter().zip(sample.point).map(|(w, x)| w * x).sum();
                (sum + bias).tanh()
            })
            .collect();
        let output: f32 = hidden.iter().zip(output_weight).map(|(h, w)| h * w).sum();
        let error = output + output_bias[0] - sample.value;
        loss += error * error / count;
        errors.push(2.0 * error / count);
        activations.push(hidden);
    }
    ready(3, &[errors.iter().sum()])?;
    let mut gradient = vec![0.0; HIDDEN];
    for (hidden, error) in activations.iter().zip(&errors) {
        gradient
            .iter_mut()
            .zip(hidden)
            .for_each(|(g, h)| *g += h * error);
    }
    ready(2, &gradient)?;
    let mut bias = vec![0.0; HIDDEN];
    let mut weight = vec![0.0; HIDDEN * INPUTS];
    for ((sample, hidden), error) in samples.iter().zip(&activations).zip(&errors) {
        for (at, h) in hidden.iter().enumerate() {
            let through = error * output_weight[at] * (1.0 - h * h);
            bias[at] += through;
            for (place, x) in weight[at * INPUTS..].iter_mut().zip(sample.point) {
                *place += through * x;
            }
        }
    }
    ready(1, &bias)?;
    ready(0, &weight)?;
    Ok(loss)
}

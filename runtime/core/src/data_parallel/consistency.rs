//! Checks that all ranks train the same model.

use super::gradient::Gradient;
use crate::group::process_group::ProcessGroup;
use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The name and shape of a parameter of the model, which must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// The parameter's name.
    pub name: String,
    /// The parameter's shape.
    pub shape: Vec<u64>,
}

impl Parameter {
    /// A parameter of this name and shape.
    pub fn new(name: impl Into<String>, shape: &[u64]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
        }
    }

    /// The number of its elements; `None` if so many `f64` do not fit in memory.
    pub(super) fn len(&self) -> Option<usize> {
        let len = self
            .shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n))?;
        usize::try_from(len)
            .ok()
            .filter(|&len| len <= isize::MAX as usize / size_of::<f64>())
    }
}

/// Checks that all ranks have the same parameters in the same order, and that the same ones are sparse on all ranks.
///
/// # Errors
/// `Mismatch`, on all ranks, describes the first difference from the group's first rank.
pub(super) fn check_parameters(
    group: &ProcessGroup,
    parameters: &[Parameter],
    is_sparse: &[bool],
) -> Result<()> {
    let description = (parameters.to_vec(), is_sparse.to_vec());
    let descriptions: Vec<(Vec<Parameter>, Vec<bool>)> = group.all_gather_object(&description)?;
    let sparse: Vec<&[bool]> = descriptions
        .iter()
        .map(|(_, sparse)| sparse.as_slice())
        .collect();
    let models: Vec<&[Parameter]> = descriptions
        .iter()
        .map(|(parameters, _)| parameters.as_slice())
        .collect();
    let first = &models[0];
    for ((model, model_sparse), &rank) in models.iter().zip(&sparse).zip(group.ranks()) {
        let mismatch = |message: String| {
            let error = Error::new(ErrorKind::Mismatch, message).with_rank(rank);
            Err(error.in_group(group.desc()))
        };
        let first_rank = group.ranks()[0];
        if model.len() != first.len() {
            return mismatch(format!(
                "rank {rank} has {} parameters, rank {first_rank} has {}",
                model.len(),
                first.len()
            ));
        }
        for (index, (parameter, expected)) in model.iter().zip(*first).enumerate() {
            if parameter != expected {
                return mismatch(format!(
                    "parameter {index} is {} {:?} on rank {rank}, {} {:?} on rank {first_rank}",
                    parameter.name, parameter.shape, expected.name, expected.shape
                ));
            }
        }
        if model_sparse != &sparse[0] {
            let differ = model_sparse.iter().zip(sparse[0]).position(|(a, b)| a != b);
            let name = differ.map_or("a parameter", |index| model[index].name.as_str());
            return mismatch(format!(
                "{name} is sparse on one of rank {rank} and rank {first_rank}, and dense on the other"
            ));
        }
    }
    Ok(())
}

/// Checks that all ranks have the same values, to the bit.
///
/// # Errors
/// `Mismatch`, on all ranks, names the first parameter that differs, and the ranks on which it differs from
/// the group's first rank.
pub(super) fn check_values<T: Gradient>(
    group: &ProcessGroup,
    parameters: &[Parameter],
    values: &[Vec<T>],
) -> Result<()> {
    const HASH: usize = 32;
    let mut hashes = Vec::with_capacity(values.len() * HASH);
    for values in values {
        let bytes = Buffer::from_slice(values);
        hashes.extend_from_slice(&Sha256::digest(bytes.as_bytes()?));
    }
    let mut all_hashes = vec![0; hashes.len() * group.size() as usize];
    group.all_gather_single(&hashes, &mut all_hashes)?;
    if hashes.is_empty() {
        return Ok(());
    }
    let hash =
        |rank: usize, index: usize| &all_hashes[rank * hashes.len() + index * HASH..][..HASH];
    for (index, parameter) in parameters.iter().enumerate() {
        let ranks = group.ranks();
        let differing = (0..ranks.len()).filter(|&rank| hash(rank, index) != hash(0, index));
        let differing: Vec<_> = differing.map(|rank| ranks[rank]).collect();
        if let Some(&first) = differing.first() {
            let message = format!(
                "parameter {} has other values on {} than on rank {}",
                parameter.name,
                text::ranks(&differing, 64),
                ranks[0]
            );
            let error = Error::new(ErrorKind::Mismatch, message).with_rank(first);
            return Err(error.in_group(group.desc()));
        }
    }
    Ok(())
}

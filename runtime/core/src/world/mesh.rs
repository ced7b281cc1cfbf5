//! [`DeviceMesh`]: the ranks of a world in several named dimensions, with a group along each.

use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use crate::world::World;
use rcomm_recorder::model::Rank;
use std::fmt;

/// The ranks of a world in named dimensions, for example pipeline stages, data-parallel replicas and tensor-parallel
/// parts.
///
/// A group along a dimension joins the ranks that differ in that dimension alone. Its description says which of the
/// groups along that dimension it is (`tp of pp 3, dp 0`), and records, errors and verdicts show the description.
pub struct DeviceMesh {
    dimensions: Vec<Dimension>,
    /// In row-major order: the coordinate in the last dimension changes from each rank to the next.
    ranks: Vec<Rank>,
    groups: Vec<ProcessGroup>,
}

struct Dimension {
    name: String,
    size: u32,
    /// This rank's position in it, from 0.
    coordinate: u32,
}

impl<B> World<B> {
    /// Arranges the ranks of [`group`](Self::group) in these dimensions, in row-major order: the last dimension has
    /// neighboring ranks. Makes a group along each. All ranks call this with the same dimensions.
    ///
    /// # Blocking
    /// See [`new_group`](Self::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if a name is empty or used twice, if there is no dimension, or if the product of the sizes is
    /// not the number of ranks; otherwise as [`new_group`](Self::new_group).
    pub fn device_mesh(&self, dimensions: &[(&str, u32)]) -> Result<DeviceMesh> {
        let ranks = self.group().ranks().to_vec();
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
        for (index, (name, _)) in dimensions.iter().enumerate() {
            if name.is_empty() || dimensions[..index].iter().any(|(other, _)| other == name) {
                return refuse(format!(
                    "the dimensions of a mesh need different names, none of them empty: {}",
                    named_sizes(dimensions.iter().copied())
                ));
            }
        }
        let product = dimensions
            .iter()
            .try_fold(1u32, |product, &(_, size)| product.checked_mul(size));
        if product.map(|product| product as usize) != Some(ranks.len()) || dimensions.is_empty() {
            let count = ranks.len();
            let message = match dimensions {
                [] => format!("a mesh of {count} ranks needs at least one dimension"),
                _ => format!(
                    "a mesh of {} does not hold {count} ranks: the product of the sizes must be the number of ranks",
                    named_sizes(dimensions.iter().copied())
                ),
            };
            return refuse(message);
        }
        let mut rest = self.group().rank();
        let mut coordinates = vec![0; dimensions.len()];
        for (coordinate, &(_, size)) in coordinates.iter_mut().zip(dimensions).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        let named = dimensions.iter().zip(coordinates);
        let mut mesh = DeviceMesh {
            dimensions: named
                .map(|(&(name, size), coordinate)| Dimension {
                    name: name.to_owned(),
                    size,
                    coordinate,
                })
                .collect(),
            ranks,
            groups: Vec::with_capacity(dimensions.len()),
        };
        for index in 0..dimensions.len() {
            let options = GroupOptions::named(mesh.describe(&[index]));
            let group = self.new_group(&mesh.along(&[index]), &options)?;
            mesh.groups.push(group);
        }
        Ok(mesh)
    }

    /// Makes a group over several dimensions of a mesh: of the ranks that differ in these alone (`dp` and `cp`, for
    /// gradients). All members of the new group call this.
    ///
    /// # Blocking
    /// See [`new_group`](Self::new_group).
    ///
    /// # Errors
    /// `InvalidArgument` if the mesh has no such dimension; otherwise as [`new_group`](Self::new_group).
    pub fn mesh_group(&self, mesh: &DeviceMesh, dimensions: &[&str]) -> Result<ProcessGroup> {
        let mut chosen = Vec::new();
        for name in dimensions {
            match mesh.position(name) {
                Some(index) => chosen.push(index),
                None => {
                    let sizes = named_sizes(mesh.dimensions());
                    let message = format!("the mesh of {sizes} has no dimension {name:?}");
                    return Err(Error::new(ErrorKind::InvalidArgument, message));
                }
            }
        }
        chosen.sort_unstable();
        chosen.dedup();
        let options = GroupOptions::named(mesh.describe(&chosen));
        self.new_group(&mesh.along(&chosen), &options)
    }
}

impl DeviceMesh {
    /// The names and sizes of the dimensions.
    pub fn dimensions(&self) -> impl Iterator<Item = (&str, u32)> {
        let dimensions = self.dimensions.iter();
        dimensions.map(|dimension| (dimension.name.as_str(), dimension.size))
    }

    /// The group along a dimension that this rank is in; `None` if there is no such dimension.
    pub fn group(&self, dimension: &str) -> Option<&ProcessGroup> {
        self.groups.get(self.position(dimension)?)
    }

    /// This rank's position in a dimension, from 0; `None` if there is no such dimension.
    pub fn coordinate(&self, dimension: &str) -> Option<u32> {
        Some(self.dimensions[self.position(dimension)?].coordinate)
    }

    /// The rank in the world at these coordinates, one for each dimension; `None` if a coordinate is outside of its
    /// dimension, or if there are more or fewer of them than dimensions.
    pub fn rank_at(&self, coordinates: &[u32]) -> Option<Rank> {
        if coordinates.len() != self.dimensions.len() {
            return None;
        }
        let mut index = 0;
        for (dimension, &coordinate) in self.dimensions.iter().zip(coordinates) {
            if coordinate >= dimension.size {
                return None;
            }
            index = index * dimension.size as usize + coordinate as usize;
        }
        self.ranks.get(index).copied()
    }

    fn position(&self, name: &str) -> Option<usize> {
        let mut dimensions = self.dimensions.iter();
        dimensions.position(|dimension| dimension.name == name)
    }

    /// The ranks that differ from this one in these dimensions alone, in the row-major order of the mesh.
    fn along(&self, chosen: &[usize]) -> Vec<Rank> {
        let mut places: Vec<Vec<u32>> = vec![Vec::new()];
        for (index, dimension) in self.dimensions.iter().enumerate() {
            let range = if chosen.contains(&index) {
                0..dimension.size
            } else {
                dimension.coordinate..dimension.coordinate + 1
            };
            places = places
                .iter()
                .flat_map(|place| {
                    let coordinates = range.clone();
                    coordinates.map(move |coordinate| [&place[..], &[coordinate]].concat())
                })
                .collect();
        }
        let ranks = places.iter().filter_map(|places| self.rank_at(places));
        ranks.collect()
    }

    /// The description of this rank's group over these dimensions, as `tp of pp 3, dp 0`.
    fn describe(&self, chosen: &[usize]) -> String {
        let names: Vec<&str> = chosen
            .iter()
            .map(|&index| self.dimensions[index].name.as_str())
            .collect();
        let others = self.dimensions.iter().enumerate();
        let others: Vec<String> = others
            .filter(|(index, dimension)| !chosen.contains(index) && dimension.size > 1)
            .map(|(_, dimension)| format!("{} {}", dimension.name, dimension.coordinate))
            .collect();
        let names = names.join("+");
        if others.is_empty() {
            return names;
        }
        format!("{names} of {}", others.join(", "))
    }
}

/// Dimensions as messages give them: `"dp" of size 2, "tp" of size 4`.
fn named_sizes<'a>(dimensions: impl Iterator<Item = (&'a str, u32)>) -> String {
    let named: Vec<String> = dimensions
        .map(|(name, size)| format!("{name:?} of size {size}"))
        .collect();
    named.join(", ")
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceMesh(")?;
        for (index, dimension) in self.dimensions.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(
                f,
                "{comma}{}: {} of {}",
                dimension.name, dimension.coordinate, dimension.size
            )?;
        }
        f.write_str(")")
    }
}

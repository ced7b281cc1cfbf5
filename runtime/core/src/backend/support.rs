//! What backends use of the core besides its traits.

pub use crate::op::buffer::element_size;
pub use crate::store::addresses_of;

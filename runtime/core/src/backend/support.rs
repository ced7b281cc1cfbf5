//! Functions of the core that backends use in addition to its traits.

pub use crate::op::buffer::element_size;
pub use crate::store::addresses_of;

//! The backends that every [`World`](crate::World) comes with: the one place that lists them.

use crate::backend::cpu::CpuFactory;
use crate::backend::nccl::{NcclBackend, NcclFactory, NcclOptions};
use crate::backend::{BackendSet, OpenBackend};
use crate::config::Config;
use std::sync::Arc;

/// The CPU backend, and NCCL where the configuration names it.
pub enum Backends {}

impl BackendSet for Backends {
    fn backends(config: &Config) -> Vec<OpenBackend> {
        let mut backends: Vec<OpenBackend> =
            vec![Box::new(|world| Ok(Arc::new(CpuFactory::prepare(world)?)))];
        if config.names_backend(NcclBackend::NAME) {
            backends.push(Box::new(|world| {
                let options = NcclOptions::of(&world.config)?;
                Ok(NcclFactory::open(world, options)?)
            }));
        }
        backends
    }
}

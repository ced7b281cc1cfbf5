//! The backends that every [`World`](crate::World) includes: the only list of them.

use rcomm_core::backend::{BackendSet, OpenBackend};
use rcomm_core::{Config, Result};
use rcomm_cpu::CpuFactory;
use rcomm_nccl::{NcclBackend, NcclFactory, NcclOptions};
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

    fn prepare(config: &Config) -> Result<()> {
        match config.names_backend(NcclBackend::NAME) {
            true => NcclFactory::prepare(&NcclOptions::of(config)?),
            false => Ok(()),
        }
    }
}

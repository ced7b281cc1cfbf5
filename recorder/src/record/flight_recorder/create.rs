//! Creates a recorder: in a file that outlives it, or in the process's memory.

use super::FlightRecorder;
use super::growth::GROWTH;
use super::nccl::Links;
use super::peers::Peers;
use super::place::Place;
use crate::error::{Error, Result};
use crate::record::clock::Clock;
use crate::record::config::{Placement, RecorderConfig, Storage, Touch};
use crate::record::file::directory::{self, Unnamed};
use crate::record::file::header::initialize;
use crate::record::file::map::Map;
use crate::record::file::names::RingId;
use crate::record::layout::{RingLayout, header};
use crate::record::processor_wait::ProcessorWaits;
use crate::record::rings;
use crate::record::sync::Memory;
use crate::record::tables::Tables;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What to do if another living process records as this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// Return an error.
    Refuse,
    /// Try the next location, and in the end the process's own memory.
    NextPlace,
}

/// The same configuration with a smaller ring: about 380 KiB instead of 3 MiB with the default values.
fn smaller(config: &RecorderConfig) -> RecorderConfig {
    RecorderConfig {
        entries: config.entries.min(512),
        groups: config.groups.min(64),
        signatures: config.signatures.min(128),
        call_sites: config.call_sites.min(64),
        ..config.clone()
    }
}

/// Whether the system has no space for a file of this size.
fn is_lack_of_space(error: &Error) -> bool {
    let full = [
        ErrorKind::StorageFull,
        ErrorKind::QuotaExceeded,
        ErrorKind::FileTooLarge,
    ];
    matches!(error, Error::Io { source, .. } if full.contains(&source.kind()))
}

impl FlightRecorder {
    /// Makes the ring and claims its name.
    ///
    /// Blocks for the time it takes to reserve and zero the memory.
    ///
    /// # Errors
    /// On an invalid configuration, if another living process records as this rank of this job and attempt, if no ring
    /// can be made in the requested directory, and if there is no memory. With [`Placement::Shared`] a directory that
    /// cannot be used is not an error: the ring is then in the process's own memory, and [`storage`](Self::storage)
    /// gives the reason.
    pub fn create(config: &RecorderConfig) -> Result<Self> {
        config.check()?;
        let in_memory = |why| {
            let layout = RingLayout::plan(config);
            let map = Map::anonymous(layout.bytes, config.touch).map_err(|error| {
                Error::io(format!("allocate a ring of {} bytes", layout.bytes), error)
            })?;
            initialize(&map, &layout, config);
            Ok(Self::over(map, layout, Storage::Memory { why }, None))
        };
        match &config.placement {
            Placement::Memory => in_memory(None),
            Placement::Dir(directory) => Self::in_directory(config, directory),
            Placement::Shared => {
                let directory = directory::default_directory();
                let created = directory::ensure_private(&directory)
                    .and_then(|()| Self::in_directory(config, &directory));
                match created {
                    Err(why @ Error::Io { .. }) => in_memory(Some(why.to_string())),
                    created => created,
                }
            }
        }
    }

    /// Like [`create`](Self::create), but tries several locations in turn: the requested directory,
    /// [`default_directory`](crate::record::default_directory),
    /// [`fallback_directory`](crate::record::fallback_directory), and the process's own memory. If a location has no
    /// space for the ring, a smaller ring is tried there before the next location. Also returns why the ring is not in
    /// the requested location, or is smaller; `None` if it is as requested.
    ///
    /// # Errors
    /// On an invalid configuration, if there is no memory for a ring either, and, if `on_conflict` is
    /// [`OnConflict::Refuse`], if another living process records as this rank.
    pub fn create_anywhere(
        config: &RecorderConfig,
        on_conflict: OnConflict,
    ) -> Result<(Self, Option<String>)> {
        config.check()?;
        let checked = |directory| (directory, true);
        let shared = [
            directory::default_directory(),
            directory::fallback_directory(),
        ];
        let shared = shared.into_iter().map(checked);
        let locations: Vec<_> = match &config.placement {
            Placement::Memory => return Ok((Self::create(config)?, None)),
            Placement::Dir(directory) => {
                let configured = std::iter::once((directory.clone(), false));
                configured.chain(shared).collect()
            }
            Placement::Shared => shared.collect(),
        };
        let mut why: Option<String> = None;
        for (directory, must_be_private) in locations {
            for config in [config.clone(), smaller(config)] {
                // The caller is responsible for the permissions of a directory that it configured.
                let usable = match must_be_private {
                    true => directory::ensure_private(&directory),
                    false => Ok(()),
                };
                let created = usable.and_then(|()| Self::in_directory(&config, &directory));
                match created {
                    Ok(created) => return Ok((created, why)),
                    Err(error @ Error::RankTaken { .. }) if on_conflict == OnConflict::Refuse => {
                        return Err(error);
                    }
                    Err(error @ (Error::Io { .. } | Error::RankTaken { .. })) => {
                        let lacks_space = is_lack_of_space(&error);
                        why.get_or_insert_with(|| error.to_string());
                        if !lacks_space {
                            break;
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let in_memory = RecorderConfig {
            placement: Placement::Memory,
            ..config.clone()
        };
        Ok((Self::create(&in_memory)?, why))
    }

    /// Makes the ring in this directory, and claims its name.
    fn in_directory(config: &RecorderConfig, directory: &Path) -> Result<Self> {
        let ring_id = RingId {
            job: &config.job,
            rank: config.rank,
            attempt: config.attempt,
            part: config.part,
        };
        let layout = RingLayout::plan(config);
        // The sections before the slots are written to at any position, so all of them are reserved now. Slots and
        // lap ring are used from their beginning on and can be reserved step by step.
        let reserved = match config.touch {
            Touch::AtOnce => layout.bytes,
            Touch::Ahead => (layout.slots.word * 8 + GROWTH).min(layout.bytes),
        };
        let unnamed = Unnamed::create(directory, ring_id, reserved, layout.bytes)?;
        let map =
            Map::of_file(unnamed.file.as_fd(), layout.bytes, config.touch).map_err(|error| {
                let shown = directory.display();
                Error::io(
                    format!("map a ring of {} bytes in {shown}", layout.bytes),
                    error,
                )
            })?;
        map.admit(reserved / 8);
        initialize(&map, &layout, config);
        map.words()[header::RESERVED].store(reserved as u64, Ordering::Relaxed);
        let (path, lock) = unnamed.publish(ring_id)?;
        Ok(Self::over(map, layout, Storage::File(path), Some(lock)))
    }

    /// The recorder that writes to this mapped ring.
    fn over(map: Map, layout: RingLayout, storage: Storage, lock: Option<OwnedFd>) -> Self {
        Self {
            map,
            slots: rings::slots(&layout),
            phases: rings::phases(&layout),
            lap: rings::lap_ring(&layout),
            kernels: rings::kernels(&layout),
            links: Links::new(&layout),
            peers: Peers::new(&layout),
            tables: Tables::new(layout),
            clock: Clock::choose(),
            layout,
            place: Place::of(storage),
            touched: AtomicUsize::new(0),
            growth_stopped: AtomicBool::new(false),
            processor_waits: Mutex::new(ProcessorWaits::new()),
            file: lock,
            closed: AtomicBool::new(false),
        }
    }
}

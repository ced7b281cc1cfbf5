//! [`HeldWorld`]: a world that several threads use, and that one of them may abandon while others wait in it.

use rcomm::{DumpHandle, Error, World};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

/// A world, until it is taken or abandoned.
pub(crate) struct HeldWorld {
    world: RwLock<Option<World>>,
    /// For dumps while a thread changes the world; `None` once it was taken or abandoned.
    dumps: Mutex<Option<DumpHandle>>,
    /// Whether the last thread that uses the world drops it.
    is_abandoned: AtomicBool,
}

impl HeldWorld {
    pub(crate) fn new(world: World) -> Self {
        Self {
            dumps: Mutex::new(Some(world.dump_handle())),
            world: RwLock::new(Some(world)),
            is_abandoned: AtomicBool::new(false),
        }
    }

    /// Uses the world, at the same time as other threads; `None` if it was taken or abandoned.
    pub(crate) fn read<T>(
        &self,
        operation: impl FnOnce(&World) -> Result<T, Error>,
    ) -> Option<Result<T, Error>> {
        let world = self.world.read().unwrap_or_else(PoisonError::into_inner);
        let used = world
            .as_ref()
            .filter(|_| !self.is_abandoned())
            .map(operation);
        drop(world);
        self.drop_if_abandoned();
        used
    }

    /// Changes the world, once no other thread uses it; `None` if it was taken or abandoned.
    pub(crate) fn change<T>(
        &self,
        operation: impl FnOnce(&mut World) -> Result<T, Error>,
    ) -> Option<Result<T, Error>> {
        let mut world = self.world.write().unwrap_or_else(PoisonError::into_inner);
        let changed = world
            .as_mut()
            .filter(|_| !self.is_abandoned())
            .map(operation);
        if let (Some(world), Some(dumps)) = (world.as_ref(), self.dumps().as_mut()) {
            // The operation may have recreated the world.
            *dumps = world.dump_handle();
        }
        drop(world);
        self.drop_if_abandoned();
        changed
    }

    /// Makes a dump, also while another thread changes the world; `None` if the world was taken or abandoned.
    pub(crate) fn dump(&self) -> Option<Result<String, Error>> {
        let dumps = self.dumps().clone()?;
        Some(dumps.dump())
    }

    fn dumps(&self) -> MutexGuard<'_, Option<DumpHandle>> {
        self.dumps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the world, once no thread uses it; `None` if it was taken or abandoned before.
    pub(crate) fn take(&self) -> Option<World> {
        let mut world = self.world.write().unwrap_or_else(PoisonError::into_inner);
        *self.dumps() = None;
        world.take()
    }

    /// Drops the world: now, or when the last thread that uses it is done. Waits for no thread.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::SeqCst);
        *self.dumps() = None;
        self.drop_if_abandoned();
    }

    fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::SeqCst)
    }

    /// Drops an abandoned world that no thread uses. Each thread calls this after it has used the world.
    fn drop_if_abandoned(&self) {
        if !self.is_abandoned() {
            return;
        }
        let taken = match self.world.try_write() {
            Ok(mut world) => world.take(),
            Err(TryLockError::Poisoned(world)) => world.into_inner().take(),
            Err(TryLockError::WouldBlock) => None,
        };
        // Dropped outside of the lock: this may wait for other ranks.
        drop(taken);
    }
}

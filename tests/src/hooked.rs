//! A backend that passes all calls on to another, with hooks for what a test wants to see or change.

use rcomm::backend::{AbortReason, Call, GroupContext, Observer};
use rcomm::{Backend, BackendFactory, Deadline, DeviceKind, Done, Op, Pending, Result};
use std::sync::Arc;

/// What a test does in the calls of a backend. The hooks of a group are dropped before its backend.
pub trait Hooks: Send + Sync + 'static {
    /// Called before an operation is issued.
    ///
    /// # Errors
    /// The error with which the test refuses the operation.
    fn issue(&self, _op: &Op<'_>, _call: &Call) -> Result<()> {
        Ok(())
    }

    /// Called before an operation is run at once.
    fn run(&self, _op: &Op<'_>, _call: &Call) {}

    /// Called when another rank has reported a failure.
    fn failed_elsewhere(&self) {}

    /// Called before the backend is aborted.
    fn abort(&self) {}
}

/// Makes backends under the name `hooked` that pass all calls on to those of `inner`, each with the hooks that `make`
/// returns for its group.
pub fn factory<H: Hooks>(
    inner: Arc<dyn BackendFactory>,
    make: impl Fn(&GroupContext) -> H + Send + Sync + 'static,
) -> Arc<dyn BackendFactory> {
    Arc::new(Factory { inner, make })
}

/// The name of these backends.
pub const NAME: &str = "hooked";

struct Factory<F> {
    inner: Arc<dyn BackendFactory>,
    make: F,
}

impl<H: Hooks, F: Fn(&GroupContext) -> H + Send + Sync + 'static> BackendFactory for Factory<F> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Hooked {
            hooks: (self.make)(&group),
            inner: self.inner.connect(group, deadline)?,
        }))
    }
}

struct Hooked<H> {
    hooks: H,
    inner: Arc<dyn Backend>,
}

impl<H: Hooks> Backend for Hooked<H> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        self.hooks.issue(&op, &call)?;
        self.inner.issue(op, call, observer)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        self.hooks.run(op, &call);
        self.inner.run(op, call, observer)
    }

    fn failed_elsewhere(&self) {
        self.hooks.failed_elsewhere();
        self.inner.failed_elsewhere();
    }

    fn abort(&self, reason: &AbortReason) {
        self.hooks.abort();
        self.inner.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        self.inner.shutdown(deadline)
    }
}

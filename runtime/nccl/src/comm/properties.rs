//! Reads what the library states of a communicator (`ncclCommQueryProperties`, dev_runtime.cc of NCCL 2.30.7). The call
//! waits for no other rank.

use super::Comm;
use crate::library::sys::CommProperties;
use rcomm_core::Result;

impl Comm {
    /// Returns the properties of a communicator that is ready; `None` if the library has no such function (before
    /// 2.29).
    ///
    /// # Errors
    /// `Backend` with the library's message; `Closed` if the communicator was ended.
    pub(crate) fn properties(&self) -> Result<Option<CommProperties>> {
        let Some(query) = self.library.table().comm_query_properties else {
            return Ok(None);
        };
        let mut properties = CommProperties::new(self.library.version().0);
        self.with(|library, raw| {
            // SAFETY: `with` lends a live communicator, locked during the call, which fills a structure of
            // the version that it names.
            let status = unsafe { query(raw, &mut properties) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(raw, "ncclCommQueryProperties", status) }
        })??;
        Ok(Some(properties))
    }

    /// Returns NCCL's own number of a communicator that is ready, as the library states it; `None` if the library does
    /// not (before 2.31).
    pub(crate) fn stated_hash(&self) -> Option<u64> {
        match self.properties() {
            Ok(properties) => properties
                .map(|properties| properties.comm_hash)
                .filter(|&hash| hash != 0),
            Err(error) => {
                tracing::warn!(%error, "NCCL does not state the number of a communicator");
                None
            }
        }
    }
}

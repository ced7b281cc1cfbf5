//! Output: reports as text, JSON and HTML, and records in the formats of other tools.

pub mod export;
pub mod print;

use rcomm_recorder::model::EntryState;

/// The state of an operation as users read it.
fn state_name(state: EntryState) -> &'static str {
    match state {
        EntryState::Scheduled => "scheduled",
        EntryState::Started => "started",
        EntryState::Completed => "completed",
        EntryState::Failed => "failed",
    }
}

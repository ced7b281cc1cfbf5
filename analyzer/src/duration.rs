//! Durations as values of options.

use rcomm_recorder::model::text::NO_DURATION;
use std::time::Duration;

/// Parses a duration, such as `500ms`, `5s`, `2m`, `1h 30m`.
///
/// # Errors
///
/// The text for the user if this is not a duration: what was expected.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| NO_DURATION.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_units_and_anything_else_says_how_to_write_one() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1h 30m"), Ok(Duration::from_secs(5400)));
        for text in ["", "5", "-5s", "soon"] {
            let error = parse_duration(text).unwrap_err();
            assert!(
                error.contains("write 500ms, 5s, 2m or 1h"),
                "{text}: {error}"
            );
        }
    }
}

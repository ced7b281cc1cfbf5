//! Parses any text as a filter. It must not panic, and the text of a parsed filter must parse to a filter that answers
//! alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm_analyzer::filter::{Filter, Subject, parse_duration_ms};

fuzz_target!(|text: &str| {
    let _ = parse_duration_ms(text);
    match Filter::parse(text) {
        Ok(filter) => {
            let again = Filter::parse(filter.text()).expect("what was read can be read again");
            let subject = Subject {
                ranks: &[0, 7],
                op: Some("all_reduce"),
                age_ms: Some(5e3),
                lag_ms: Some(f64::NAN),
                seq: Some(41),
                bytes: Some(1 << 20),
                text,
                ..Subject::default()
            };
            assert_eq!(filter.matches(&subject), again.matches(&subject));
        }
        Err(error) => assert!(error.column >= 1, "{error}"),
    }
});

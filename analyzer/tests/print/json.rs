//! Tests the JSON report against its schema.

use crate::sample;
use rcomm_analyzer::load::{LoadOptions, load};
use rcomm_analyzer::print::json;
use rcomm_analyzer::{Analysis, Extent, Policy, Report, Unread};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The schema with every object closed: a field that it does not describe is an error in these tests. Readers must
/// accept such a field, since later versions may add it.
fn closed_schema() -> Value {
    fn close(value: &mut Value) {
        match value {
            Value::Object(map) => {
                if map.get("type") == Some(&Value::from("object")) {
                    map.insert("additionalProperties".into(), false.into());
                }
                map.values_mut().for_each(close);
            }
            Value::Array(items) => items.iter_mut().for_each(close),
            _ => {}
        }
    }
    let mut schema = serde_json::from_str(json::SCHEMA).unwrap();
    close(&mut schema);
    schema
}

/// The report as it is printed.
fn printed(report: &Report) -> String {
    let mut out = Vec::new();
    json::write(report, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn every_report_keeps_to_the_schema() {
    let validator = jsonschema::validator_for(&closed_schema()).unwrap();
    let mut of_unknown_size = sample::inconclusive();
    of_unknown_size.input.may_have_more = true;
    for report in [
        of_unknown_size,
        sample::stuck(),
        sample::cycle(),
        sample::healthy(),
        sample::running(),
        sample::inconclusive(),
        sample::warning(),
    ] {
        let value: Value = serde_json::from_str(&printed(&report)).unwrap();
        let errors: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{} at {}", error, error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{errors:#?}");
    }
}

/// The report on the records in a folder.
fn judge(folder: &Path) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    let folder = [folder.to_owned()];
    let loaded = load(&folder, &LoadOptions::default(), |loaded| {
        let extent = if loaded.cut {
            Extent::Cut
        } else {
            Extent::Whole
        };
        analysis.add_from(&loaded.path, &loaded.dump, extent);
    });
    for problem in loaded.unwrap().problems {
        analysis.add_problem(problem, Unread::Part);
    }
    analysis.finish()
}

#[test]
fn the_report_of_every_checked_in_job_keeps_to_the_schema() {
    let validator = jsonschema::validator_for(&closed_schema()).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps");
    let folders_in = |parent: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(parent).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.is_dir()).collect()
    };
    let folders: Vec<PathBuf> = folders_in(&fixtures)
        .iter()
        .flat_map(|scenario| folders_in(scenario))
        .collect();
    assert!(folders.len() > 40, "{folders:?}");
    let mut findings = 0;
    for folder in folders {
        let report = judge(&folder);
        assert!(
            report.input.entries > 0,
            "{} holds nothing",
            folder.display()
        );
        findings += report.findings.len();
        let value: Value = serde_json::from_str(&printed(&report)).unwrap();
        let errors: Vec<String> = validator
            .iter_errors(&value)
            .map(|error| format!("{} at {}", error, error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{}: {errors:#?}", folder.display());
    }
    assert!(findings > 30, "{findings} findings in all");
}

#[test]
fn schema_refuses_what_is_no_report() {
    let validator = jsonschema::validator_for(&closed_schema()).unwrap();
    let valid: Value = serde_json::from_str(&printed(&sample::stuck())).unwrap();
    for (path, value) in [
        ("/verdict", Value::from("fine")),
        ("/findings/0/confidence", Value::from(1.5)),
        ("/findings/0/culprit_ranks/0", Value::from(-1)),
        ("/findings/0/seq_kind", Value::from("record_id")),
        ("/schema", Value::from("rcomm.report/2")),
    ] {
        let mut invalid = valid.clone();
        *invalid.pointer_mut(path).unwrap() = value;
        assert!(!validator.is_valid(&invalid), "{path} was accepted");
    }
}

#[test]
fn a_report_read_back_from_json_is_equal() {
    let report = sample::stuck();
    let read_back: Report = serde_json::from_str(&printed(&report)).unwrap();
    assert_eq!(read_back, report);
}

#[test]
fn keys_have_a_stable_order() {
    let text = printed(&sample::stuck());
    assert_eq!(text, printed(&sample::stuck()));
    let position = |key: &str| text.find(&format!("\"{key}\"")).unwrap();
    assert!(position("schema") < position("verdict"));
    assert!(position("verdict") < position("findings"));
    assert!(position("findings") < position("problems"));
    assert!(text.ends_with("}\n"));
}

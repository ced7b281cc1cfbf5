//! The files for deployment are valid for the programs that read them.

mod common;

use common::npm::installed_by_npm;
use common::skip;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn deploy_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

/// Whether a program exists and succeeds with these arguments.
fn runs(program: &Path, args: &[&str]) -> bool {
    let output = Command::new(program).args(args).output();
    output.is_ok_and(|output| output.status.success())
}

/// Runs a program that must succeed, and returns its output.
fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("the program was found before");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

#[test]
fn systemd_accepts_the_unit_without_warnings() {
    if !runs(Path::new("systemd-analyze"), &["--version"]) {
        return skip("systemd-analyze is not installed");
    }
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let unit = std::fs::read_to_string(deploy_folder().join("systemd/rcomm-web.service"));
    // The program and the user that the unit names need not exist where this test runs.
    let unit = unit
        .expect("the path is readable")
        .replace("/usr/local/bin/rcomm-web", "/bin/true");
    let path = folder.path().join("rcomm-web.service");
    std::fs::write(&path, unit.replace("User=trainer", "User=root")).expect("the path is writable");
    let output = succeed(Command::new("systemd-analyze").arg("verify").arg(&path));
    assert!(!output.contains("rcomm-web.service:"), "{output}");
}

/// Every option of `rcomm-web` in the deployed files is an option that its help names.
#[test]
fn deployed_commands_use_options_that_exist() {
    let help = succeed(Command::new(env!("CARGO_BIN_EXE_rcomm-web")).arg("--help"));
    // Whole words: `--token` is no part of `--token-file`.
    let options: BTreeSet<&str> = help
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
        .filter_map(|word| word.strip_prefix("--"))
        .collect();
    let mut seen = 0;
    for file in [
        "systemd/rcomm-web.service",
        "kubernetes/rcomm-web.yml",
        "docker-compose.yml",
    ] {
        let text =
            std::fs::read_to_string(deploy_folder().join(file)).expect("the path is readable");
        let lines = text.lines().filter(|line| {
            line.contains("ExecStart")
                || line.trim().starts_with("- --listen")
                || line.contains("rcomm-web --")
                || line.trim().starts_with("- --")
                || line.contains("command: [\"--listen\"")
        });
        for word in lines.flat_map(|line| line.split([' ', '"', ','])) {
            let Some(option) = word
                .strip_prefix("--")
                .and_then(|word| word.split('=').next())
            else {
                continue;
            };
            // The same files contain options of Prometheus and kubectl.
            if option.contains('.') || ["enable-feature", "from-literal"].contains(&option) {
                continue;
            }
            assert!(options.contains(option), "{file}: --{option}");
            seen += 1;
        }
    }
    assert!(seen >= 12, "{seen}");
}

#[test]
fn kubernetes_schemas_accept_the_manifests() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kubernetes-python");
    let (python, validate) = (
        folder.join("bin/python"),
        folder.join("bin/kubernetes-validate"),
    );
    let folder_text = folder.to_str().expect("the path is UTF-8");
    let is_installed = runs(&validate, &["--version"])
        || (runs(Path::new("python3"), &["-m", "venv", folder_text])
            && runs(
                &python,
                &["-m", "pip", "install", "--quiet", "kubernetes-validate"],
            ));
    if !is_installed {
        return skip("kubernetes-validate is not installed, and pip cannot install it");
    }
    let text = std::fs::read_to_string(deploy_folder().join("kubernetes/rcomm-web.yml"));
    let text = text.expect("the path is readable");
    let parts: Vec<&str> = text.split("\n---\n").collect();
    assert_eq!(parts.len(), 3);
    // The monitor is a resource of an operator, for which these schemas have no rules: see the next test.
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    for (number, part) in parts[..2].iter().enumerate() {
        let path = files.path().join(format!("{number}.yml"));
        std::fs::write(&path, part).expect("the path is writable");
        let output = succeed(Command::new(&validate).arg("--strict").arg(&path));
        assert!(output.contains("passed"), "{output}");
    }
}

/// The monitor, validated by the operator's own types.
#[test]
fn the_monitor_is_valid_for_prometheus_operator() {
    if !runs(Path::new("node"), &["--version"]) {
        return skip("node is not installed");
    }
    let packages = ["@kubernetes-models/prometheus-operator@6.0.0", "yaml@2.9.1"];
    let Some(modules) = installed_by_npm("prometheus-operator", &packages) else {
        return;
    };
    let text = std::fs::read_to_string(deploy_folder().join("kubernetes/rcomm-web.yml"));
    let text = text.expect("the path is readable");
    let monitor = text
        .split("\n---\n")
        .last()
        .expect("a split has at least one part");
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("monitor.yml");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/validate_monitor.mjs");
    let validate = |monitor: &str| {
        std::fs::write(&path, monitor).expect("the path is writable");
        let output = Command::new("node")
            .args([&script, &modules, &path])
            .output();
        let output = output.expect("node runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(errors, "");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(validate(monitor), "valid\n");
    // The check itself finds a misspelled field and an invalid duration.
    let misspelled = validate(&monitor.replace("type: Bearer", "typ: Bearer"));
    assert!(
        misspelled.contains("authorization.typ is no field"),
        "{misspelled}"
    );
    let soon = validate(&monitor.replace("interval: 15s", "interval: soon"));
    assert!(soon.contains("interval must match"), "{soon}");
}

#[test]
fn the_schema_of_grafana_accepts_the_dashboards() {
    if !runs(Path::new("node"), &["--version"]) {
        return skip("node is not installed");
    }
    let packages = ["@grafana/schema@13.2.3", "typescript@5.9.3"];
    let Some(modules) = installed_by_npm("grafana-schema", &packages) else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/validate_dashboards.mjs");
    let validate = |folder: &Path| {
        let output = Command::new("node")
            .args([&script, &modules, folder])
            .output();
        let output = output.expect("node runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(errors, "");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let dashboards = deploy_folder().join("grafana/dashboards");
    assert_eq!(validate(&dashboards), "valid\n");
    // The check itself finds an unknown value, a misspelled field, and a type of panel without a schema.
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let text = std::fs::read_to_string(dashboards.join("job-overview.json"))
        .expect("the path is readable");
    for (number, (right, wrong)) in [
        (r#""colorMode": "value""#, r#""colorMode": "valu""#),
        (r#""gridPos""#, r#""gridpos""#),
        (r#""type": "table""#, r#""type": "tabel""#),
    ]
    .iter()
    .enumerate()
    {
        let changed = text.replacen(right, wrong, 1);
        assert_ne!(changed, text, "{right}");
        std::fs::write(folder.path().join(format!("{number}.json")), changed)
            .expect("the path is writable");
    }
    let found = validate(folder.path());
    for (file, mistake) in [
        ("0.json", "valu"),
        ("1.json", "gridpos"),
        ("2.json", "tabel"),
    ] {
        let is_found = found
            .lines()
            .any(|line| line.starts_with(file) && line.contains(mistake));
        assert!(is_found, "{file}: {found}");
    }
}

//! The program and its control port, as a test in another language uses them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use common::{client_of, get, put};
use serde_json::{Value, json};

struct Program {
    child: Child,
    ready: Value,
}

impl Program {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_s3-testserver"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        Self {
            child,
            ready: serde_json::from_str(&line).unwrap(),
        }
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let port = u16::try_from(self.ready["control_port"].as_u64().unwrap()).unwrap();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let split = answer
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .unwrap();
        let status = std::str::from_utf8(&answer[9..12])
            .unwrap()
            .parse()
            .unwrap();
        (status, answer.split_off(split + 4))
    }

    fn json(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        };
        let (status, answer) = self.ask(method, path, &body);
        (status, serde_json::from_slice(&answer).unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_is_steered_over_its_control_port() {
    let program = Program::start(&[
        "--access-key",
        "A",
        "--secret-key",
        "S",
        "--bucket",
        "test",
        "--bucket",
        "two",
    ]);
    let client = client_of(program.ready["endpoint"].as_str().unwrap(), "A", "S", None);
    let (_, health) = program.json("GET", "/health", Value::Null);
    assert_eq!(
        health,
        json!({"ok": true, "listening": true, "buckets": ["test", "two"]})
    );

    let rule =
        json!([{"name": "r", "operation": "PutObject", "key": "root.", "count": 1, "status": 503}]);
    let (status, rules) = program.json("PUT", "/faults", rule);
    assert_eq!((status, rules[0]["hits"].as_u64()), (200, Some(0)));
    assert_eq!(
        put(&client, "root.1", b"one").await.unwrap_err(),
        "SlowDown"
    );
    put(&client, "root.1", b"one").await.unwrap();
    assert_eq!(
        program.json("GET", "/faults", Value::Null).1[0]["matched"],
        2
    );
    assert_eq!(
        program.json("PUT", "/faults", json!([{"misspelt": 1}])).0,
        400
    );
    assert_eq!(program.json("DELETE", "/faults", Value::Null).1, json!([]));

    let (status, log) = program.json(
        "GET",
        "/log?operation=PutObject&done=true&min=2",
        Value::Null,
    );
    assert_eq!((status, log.as_array().unwrap().len()), (200, 2));
    assert_eq!(
        (&log[0]["status"], &log[0]["rule"], &log[0]["outcome"]),
        (&json!(503), &json!("r"), &json!("answered"))
    );
    assert_eq!(
        program
            .json(
                "GET",
                "/log?operation=GetObject&min=1&timeout_ms=10",
                Value::Null
            )
            .0,
        408
    );
    program.json("DELETE", "/log", Value::Null);
    assert_eq!(program.json("GET", "/log", Value::Null).1, json!([]));

    let (_, objects) = program.json("GET", "/objects?prefix=root", Value::Null);
    assert_eq!(
        (objects[0]["key"].as_str(), objects[0]["size"].as_u64()),
        (Some("root.1"), Some(3))
    );
    assert_eq!(
        program.ask("GET", "/object?key=root.1", b""),
        (200, b"one".to_vec())
    );
    assert_eq!(program.ask("PUT", "/object?key=root.1", b"rot").0, 200);
    assert_eq!(get(&client, "root.1").await.unwrap(), b"rot");
    assert_eq!(
        program.json("GET", "/objects", Value::Null).1[0]["etag"],
        objects[0]["etag"]
    );
    assert_eq!(program.ask("DELETE", "/object?key=root.1", b"").0, 200);
    assert_eq!(program.ask("DELETE", "/object?key=root.1", b"").0, 404);

    assert_eq!(
        program.json("POST", "/down", Value::Null).1,
        json!({"listening": false})
    );
    assert_eq!(put(&client, "k", b"x").await.unwrap_err(), "lost");
    assert_eq!(
        program.json("POST", "/up", Value::Null).1,
        json!({"listening": true})
    );
    put(&client, "k", b"x").await.unwrap();

    program.json(
        "POST",
        "/faults",
        json!({"operation": "GetObject", "hang": "gate"}),
    );
    let hanging = tokio::spawn(async move { get(&client, "k").await });
    assert_eq!(
        program
            .json("GET", "/log?hanging=gate&min=1", Value::Null)
            .0,
        200
    );
    program.json("POST", "/release/gate", Value::Null);
    assert_eq!(hanging.await.unwrap().unwrap(), b"x");
    assert_eq!(
        program.json("DELETE", "/objects?prefix=", Value::Null).1,
        json!({"removed": 1})
    );
    assert_eq!(program.json("GET", "/nothing", Value::Null).0, 404);
}

#[test]
fn program_ends_with_its_standard_input() {
    let mut program = Program::start(&["--until-eof"]);
    drop(program.child.stdin.take());
    assert!(program.child.wait().unwrap().success());
}

//! One request, with its faults.
//!
//! Owns the order in which a rule's actions happen around the operation. Does not own which rule
//! hits (`faults`), what an operation does (`s3`) or what happens to bytes (`body`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use s3s::service::S3Service;
use s3s::{HttpError, S3Error, S3ErrorCode};
use tokio::sync::watch;

use crate::body::{Broken, Cut, Shape, Shaped, Side};
use crate::clock;
use crate::facts::Facts;
use crate::faults::{Barrier, Faults, Hit, Rule};
use crate::log::{Log, Ticket};
use crate::s3::{IgnoreConditions, IgnoreRange};

pub(crate) type Answer = Response<Shaped<s3s::Body>>;

/// What every connection shares.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub s3: S3Service,
    pub faults: Faults,
    pub log: Log,
}

impl Service {
    /// Answers a request; an error closes the connection.
    pub(crate) async fn call(
        &self,
        request: Request<Incoming>,
        flushes: watch::Receiver<u64>,
    ) -> Result<Answer, Broken> {
        let (mut head, body) = request.into_parts();
        let facts = Facts::of(&head);
        let hit = self.faults.hit(&facts);
        let name = hit.as_ref().map(|hit| hit.rule.name.clone());
        let ticket = Arc::new(self.log.begin(&facts, name));
        let Hit { rule, mut barrier } = hit.unwrap_or_default();
        let mut body = Shaped::new(
            body,
            Side::Request,
            Arc::clone(&ticket),
            request_shape(&rule),
        );

        if !rule.after_effect
            && let Some(error) = interrupt(&rule, &mut barrier, &ticket).await?
        {
            // Read it all: a client that is still sending may see a reset instead of the answer.
            drain(&mut body).await?;
            return Ok(answer(error, &rule, &ticket, flushes, &facts));
        }
        if rule.check_time && clock::is_too_far(&head.headers, clock_ms(&rule)) {
            drain(&mut body).await?;
            let refusal = Rule {
                code: Some("RequestTimeTooSkewed".to_owned()),
                ..rule.clone()
            };
            let refused = error_response(403, &refusal)?;
            return Ok(answer(refused, &rule, &ticket, flushes, &facts));
        }
        if rule.ignore_conditions {
            head.extensions.insert(IgnoreConditions);
        }
        if rule.ignore_range {
            head.extensions.insert(IgnoreRange);
        }
        let response = self
            .s3
            .call(Request::from_parts(head, s3_body(body)))
            .await
            .map_err(broken)?;
        if rule.cut_request_after_bytes.is_some() || rule.lose_answer {
            return Err(Broken::ByFault);
        }
        if rule.after_effect
            && let Some(error) = interrupt(&rule, &mut barrier, &ticket).await?
        {
            return Ok(answer(error, &rule, &ticket, flushes, &facts));
        }
        Ok(answer(response, &rule, &ticket, flushes, &facts))
    }
}

/// Hang, delay, drop and status of a rule.
async fn interrupt(
    rule: &Rule,
    barrier: &mut Option<Barrier>,
    ticket: &Ticket,
) -> Result<Option<Response<s3s::Body>>, Broken> {
    if let Some(barrier) = barrier {
        ticket.update(|entry| entry.hanging.clone_from(&rule.hang));
        barrier.wait().await;
        ticket.update(|entry| entry.hanging = None);
    }
    if rule.delay_ms > 0 {
        tokio::time::sleep(Duration::from_millis(rule.delay_ms)).await;
    }
    if rule.drop_connection {
        return Err(Broken::ByFault);
    }
    rule.status
        .map(|status| error_response(status, rule))
        .transpose()
}

// Apart, because the compiler cannot prove this conversion `Send` inside an async function.
fn s3_body(body: Shaped<Incoming>) -> s3s::Body {
    s3s::Body::http_body_unsync(body)
}

fn broken(error: HttpError) -> Broken {
    Broken::by(s3s::StdError::from(error))
}

fn request_shape(rule: &Rule) -> Shape {
    Shape {
        rate_bytes_per_s: rule.rate_bytes_per_s,
        corrupt_at: rule.corrupt_request_at,
        cut_after: rule.cut_request_after_bytes.map(|bytes| Cut {
            bytes,
            flushes: None,
        }),
    }
}

fn answer(
    response: Response<s3s::Body>,
    rule: &Rule,
    ticket: &Arc<Ticket>,
    flushes: watch::Receiver<u64>,
    facts: &Facts,
) -> Answer {
    let status = response.status().as_u16();
    ticket.update(|entry| entry.status = Some(status));
    let shape = Shape {
        rate_bytes_per_s: rule.rate_bytes_per_s,
        corrupt_at: rule.corrupt_at,
        cut_after: rule.cut_after_bytes.map(|bytes| Cut {
            bytes,
            flushes: Some(flushes),
        }),
    };
    if facts.method == http::Method::HEAD {
        // hyper never asks for the body of this one.
        ticket.answered();
    }
    let mut response = response;
    if rule.clock_ahead_ms.is_some()
        && let Some(date) = clock::http_date(clock_ms(rule))
    {
        response.headers_mut().insert(http::header::DATE, date);
    }
    response.map(|body| Shaped::new(body, Side::Response, Arc::clone(ticket), shape))
}

fn clock_ms(rule: &Rule) -> i64 {
    clock::real_ms().saturating_add(rule.clock_ahead_ms.unwrap_or(0))
}

fn error_response(status: u16, rule: &Rule) -> Result<Response<s3s::Body>, Broken> {
    if let Some(page) = &rule.page {
        let kind = if page.starts_with('<') {
            "text/html"
        } else {
            "text/plain"
        };
        return Response::builder()
            .status(status)
            .header(http::header::CONTENT_TYPE, kind)
            .header(http::header::CONTENT_LENGTH, page.len())
            .body(s3s::Body::from(page.clone()))
            .map_err(Broken::by);
    }
    let code = rule.code.as_deref().unwrap_or(match status {
        503 => "SlowDown",
        403 => "AccessDenied",
        404 => "NoSuchKey",
        409 => "ConditionalRequestConflict",
        412 => "PreconditionFailed",
        _ => "InternalError",
    });
    let code = S3ErrorCode::from_bytes(code.as_bytes()).unwrap_or(S3ErrorCode::InternalError);
    let mut error = S3Error::with_message(code, "a fault of the test server");
    error.set_status_code(StatusCode::from_u16(status).map_err(Broken::by)?);
    error.set_request_id(format!("fault-{}", rule.name));
    let mut response = error.to_http_response().map_err(Broken::by)?;
    if let Some(seconds) = rule.retry_after_s {
        response
            .headers_mut()
            .insert(http::header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    Ok(response)
}

async fn drain(
    body: &mut (impl http_body::Body<Data = Bytes, Error = Broken> + Unpin),
) -> Result<(), Broken> {
    while let Some(frame) = body.frame().await {
        frame?;
    }
    Ok(())
}

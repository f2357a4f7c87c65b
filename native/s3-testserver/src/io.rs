//! A connection that counts its flushes.
//!
//! Owns the knowledge that everything written so far has reached the socket: a body that must be
//! cut after exactly n bytes waits for it. Does not own the cut.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;

/// See the module.
#[derive(Debug)]
pub(crate) struct FlushCounting<T> {
    inner: T,
    flushes: watch::Sender<u64>,
}

impl<T> FlushCounting<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self {
            inner,
            flushes: watch::Sender::new(0),
        }
    }

    pub(crate) fn flushes(&self) -> watch::Receiver<u64> {
        self.flushes.subscribe()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for FlushCounting<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for FlushCounting<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        if let Poll::Ready(Ok(())) = flushed {
            self.flushes.send_modify(|count| *count += 1);
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

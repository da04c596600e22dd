// Package admin is the HTTP server beside the stream: metrics, health, status.
// It only shows what others give it and changes nothing.
package admin

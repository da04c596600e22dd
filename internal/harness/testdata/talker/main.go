// Talker stands for walrelay in the harness's own tests: it logs JSON, and ends well on SIGTERM.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	fmt.Println("args", os.Args[1:])
	if os.Args[1] == "fail" {
		fmt.Fprint(os.Stderr, "no newline at the end")
		os.Exit(4)
	}
	fmt.Fprintln(os.Stderr, `{"level":"info","component":"relay","lsn":"0/1A2B3C8","xid":12345678901234567890,"message":"streaming"}`)
	tick := time.NewTicker(5 * time.Millisecond)
	for i := 0; ; i++ {
		select {
		case <-signals:
			fmt.Fprintln(os.Stderr, `{"level":"info","message":"stopped"}`)
			return
		case <-tick.C:
			fmt.Fprintf(os.Stderr, "{\"level\":\"debug\",\"n\":%d,\"message\":\"tick\"}\n", i)
		}
	}
}

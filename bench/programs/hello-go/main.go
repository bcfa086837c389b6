// The server in Go that bench/hibernate measures: hello ADDRESS
package main

import (
	"log"
	"net/http"
	"os"
)

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("hello")) })
	log.Fatal(http.ListenAndServe(os.Args[1], nil))
}
